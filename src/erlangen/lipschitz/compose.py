"""Networks of Lipschitz layers: in sequence, and around a skip connection."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from erlangen.lipschitz.base import Activation, LipschitzLayer


class Sequential(LipschitzLayer):
    """Layers in order. As a whole network its first layer is `BoundedInput`.

    network = Sequential(
        BoundedInput((1, 28, 28), bound=20.0),
        SpectralConv2d(1, 16, 3), MaxMin(),
        Flatten(), SpectralDense(16 * 28 * 28, 10),
    )
    """

    def __init__(self, *layers: LipschitzLayer) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.append(layer, index)

    def append(self, layer: LipschitzLayer, index: int | None = None) -> Sequential:
        """One layer more; refuses modules whose bounds nobody knows."""
        if not isinstance(layer, LipschitzLayer):
            raise TypeError(
                f"{type(layer).__name__} is not a LipschitzLayer: nobody knows its bounds. Use the layers of "
                "erlangen.lipschitz, or subclass LipschitzLayer and write propagate_input, backpropagate_cotangent "
                "and parameter_bound."
            )
        self.add_module(str(len(self._modules) if index is None else index), layer)
        return self

    def __iter__(self) -> Iterator[LipschitzLayer]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> LipschitzLayer:
        return list(self)[index]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x

    def activations(self, x: Activation) -> list[Activation]:
        """X_0 … X_D: what each layer receives, and what the last one gives (Algorithm 1, lines 1–3)."""
        found = [x]
        for layer in self:
            found.append(layer.propagate_input(found[-1]))
        return found

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        return self.propagate_input(x).shape

    def propagate_input(self, x: Activation) -> Activation:
        return self.activations(x)[-1]

    def jacobian_bound(self, x: Activation) -> float:
        bound = 1.0
        for layer, received in zip(self, self.activations(x)):
            bound *= layer.jacobian_bound(received)
        return bound

    def backpropagate_cotangent(self, x: Activation, g: float) -> float:
        for layer, received in reversed(list(zip(self, self.activations(x)))):
            g = layer.backpropagate_cotangent(received, g)
        return g

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        """Algorithm 1, lines 5–8: from the last layer to the first, Δ_d from the cotangent bound, then the next one."""
        bounds: dict[str, float] = {}
        for (name, layer), received in reversed(list(zip(self._modules.items(), self.activations(x)))):
            assert isinstance(layer, LipschitzLayer)
            own = layer.parameter_bound(received, g)
            bounds.update({f"{name}.{parameter}": bound for parameter, bound in own.items()})
            g = layer.backpropagate_cotangent(received, g)
        return bounds

    def project(self) -> None:
        for layer in self:
            layer.project()


class Residual(LipschitzLayer):
    """x + f(x), or (x + f(x))/2 with ``average=True``, which keeps the Lipschitz constant at 1."""

    def __init__(self, *body: LipschitzLayer, average: bool = True) -> None:
        super().__init__()
        self.body = Sequential(*body)
        self.share = 0.5 if average else 1.0

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.body(x)
        return total * self.share if self.share != 1.0 else total

    def propagate_input(self, x: Activation) -> Activation:
        inner = self.body.propagate_input(x)
        if inner.shape != x.shape:
            raise ValueError(f"a residual block cannot add its body's output {inner.shape} to its input {x.shape}")
        return x.to(x.shape, self.share * (x.norm + inner.norm) * x.rounded)

    def jacobian_bound(self, x: Activation) -> float:
        return self.share * (1.0 + self.body.jacobian_bound(x)) * x.rounded

    def backpropagate_cotangent(self, x: Activation, g: float) -> float:
        return self.share * g * x.rounded + self.body.backpropagate_cotangent(x, self.share * g) * x.rounded

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        inner = self.body.parameter_bound(x, self.share * g * x.rounded)
        return {f"body.{name}": bound for name, bound in inner.items()}

    def project(self) -> None:
        self.body.project()

    def extra_repr(self) -> str:
        return "average" if self.share == 0.5 else "sum"


def layers(network: nn.Module) -> Iterator[tuple[str, LipschitzLayer]]:
    """(path, layer) of every Lipschitz layer that is not a container of others."""
    for path, module in network.named_modules():
        if isinstance(module, LipschitzLayer) and not isinstance(module, (Sequential, Residual)):
            yield path, module
