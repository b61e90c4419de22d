"""RNN, LSTM and GRU, unrolled: gates_t = W_ih x_t + b_ih + W_hh h_{t−1} + b_hh.

A zero *probe* is added to the hidden side of every step's gates. Its cotangent is that of all steps at once, so each
weight needs one tap however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.pieces import Dense, Outer, Piece
from erlangen.gradients.registry import rule
from erlangen.gradients.rules.linear import tapped_linear, tokens
from erlangen.gradients.tape import Tape

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]


def _rnn(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, h, state: (activation(x + h),)


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    update = (xz + hz).sigmoid()
    return ((1 - update) * (xn + (xr + hr).sigmoid() * hn).tanh() + update * state[0],)


@rule(nn.RNN, nn.LSTM, nn.GRU)
def recurrent(module: nn.RNNBase, tape: Tape, input: Tensor, hx: Tensor | State | None = None) -> tuple[Tensor, object]:
    if not isinstance(input, Tensor) or input.ndim != 3:
        got = f"[{', '.join(map(str, input.shape))}]" if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(
            f"{type(module).__name__} got {got}; it trains privately on padded [batch, time, features] tensors. In place of "
            "pack_padded_sequence pad every record to one fixed length, and take the output at each record's last token"
        )
    x = input if module.batch_first else input.transpose(0, 1)
    states = _initial(module, x, hx)
    cell = (
        _lstm
        if module.mode == "LSTM"
        else _gru
        if module.mode == "GRU"
        else _rnn(torch.tanh if module.mode == "RNN_TANH" else torch.relu)
    )
    directions = 2 if module.bidirectional else 1
    finals: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            out, final = _unroll(module, tape, x, cell, states[layer * directions + direction], layer, direction)
            outputs.append(out)
            finals.append(final)
        x = torch.cat(outputs, -1)
        if layer + 1 < module.num_layers and module.dropout:
            x = F.dropout(x, module.dropout, module.training)
    stacked = tuple(torch.stack(column) for column in zip(*finals, strict=True))
    out = x if module.batch_first else x.transpose(0, 1)
    return out, stacked if module.mode == "LSTM" else stacked[0]


def _initial(module: nn.RNNBase, x: Tensor, hx: Tensor | State | None) -> list[State]:
    count = module.num_layers * (2 if module.bidirectional else 1)
    if hx is None:
        h = x.new_zeros(count, x.shape[0], module.proj_size or module.hidden_size)
        hx = (h, x.new_zeros(count, x.shape[0], module.hidden_size)) if module.mode == "LSTM" else (h,)
    parts = hx if isinstance(hx, tuple) else (hx,)
    return [tuple(part[i] for part in parts) for i in range(count)]


def _unroll(
    module: nn.RNNBase, tape: Tape, x: Tensor, cell: Cell, state: State, layer: int, direction: int
) -> tuple[Tensor, State]:
    suffix = f"_l{layer}" + ("_reverse" if direction else "")

    def get(name: str) -> Any:
        return getattr(module, name + suffix, None)

    w_hh, b_hh, w_hr = get("weight_hh"), get("bias_hh"), get("weight_hr")
    gates = tapped_linear(tape, x, get("weight_ih"), get("bias_ih"), 0)
    history: list[Tensor] = []

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        d = tokens(cotangent, views)
        if w_hh.requires_grad:
            yield w_hh, Outer(tokens(torch.stack(history, 1), views), d)
        if b_hh is not None and b_hh.requires_grad:
            yield b_hh, Dense(d.sum(1))

    probe = tape.tap(torch.zeros_like(gates), (), (w_hh, b_hh), pieces)
    fixed_w, fixed_b = w_hh.detach(), None if b_hh is None else b_hh.detach()
    order = range(x.shape[1] - 1, -1, -1) if direction else range(x.shape[1])
    outputs: dict[int, Tensor] = {}
    steps: dict[int, Tensor] = {}
    for t in order:
        steps[t] = state[0].detach()
        state = cell(gates[:, t], F.linear(state[0], fixed_w, fixed_b) + probe[:, t], state)
        if w_hr is not None:
            state = (tapped_linear(tape, state[0], w_hr, None, 0), *state[1:])
        outputs[t] = state[0]
    history.extend(steps[t] for t in range(x.shape[1]))
    return torch.stack([outputs[t] for t in range(x.shape[1])], 1), state
