"use strict";
// Draws the figures in the colours of the page, again when the reader's system changes between light and dark.
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const narrow = matchMedia("(max-width: 40rem)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const withAlpha = (hex, alpha) => {
    const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };

  const colour = (token) => {
    const [name, alpha] = token.slice(1).split(":");
    if (name === "sequential") return [[0, css("surface")], [0.25, css("soft")], [1, css("c0")]];
    if (name === "diverging") return [[0, css("c0")], [0.5, css("surface")], [1, css("c1")]];
    return alpha ? withAlpha(css(name), alpha) : css(name);
  };

  // Colours stand only at these keys; a user's text that begins with @ is left alone.
  const COLOURS = new Set(["color", "colorscale", "fillcolor", "gridcolor", "zerolinecolor", "linecolor", "tickcolor", "bgcolor", "bordercolor", "activecolor"]);
  const themed = (value, key) => {
    if (typeof value === "string") return COLOURS.has(key) && value.startsWith("@") ? colour(value) : value;
    if (Array.isArray(value)) return value.map((entry) => themed(entry, ""));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
    return value;
  };

  const draw = (element) => {
    const figure = themed(specs[element.dataset.figure], "");
    if (touch) figure.layout.dragmode = false; // a finger scrolls the page
    if (narrow.matches) {
      figure.layout.font.size = 11;
      figure.layout.margin = { ...figure.layout.margin, l: 40, r: 8 };
      for (const trace of figure.data) if (trace.colorbar) trace.colorbar = { ...trace.colorbar, thickness: 8, title: { text: "" } };
    }
    const config = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
    element.dataset.drawn = "yes";
    return Plotly.react(element, figure.data, figure.layout, config);
  };

  const elements = [...document.querySelectorAll("[data-figure]")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "800px" });
  elements.forEach((element) => watcher.observe(element));
  const drawn = () => elements.filter((element) => element.dataset.drawn);
  dark.addEventListener("change", () => drawn().forEach(draw));
  narrow.addEventListener("change", () => drawn().forEach(draw));
  addEventListener("beforeprint", () => elements.forEach(draw));
})();
