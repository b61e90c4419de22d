"use strict";
// Draws a figure of erlangen.report in the colours of the page, again when the reader's system changes between light and dark.
const Figures = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const narrow = matchMedia("(max-width: 40rem)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const COLOURS = new Set(["color", "colorscale", "fillcolor", "gridcolor", "zerolinecolor", "linecolor", "tickcolor", "bgcolor", "bordercolor", "activecolor"]);

  const colour = (token) => {
    const [name, alpha] = token.slice(1).split(":");
    if (name === "sequential") return [[0, css("surface")], [0.25, css("soft")], [1, css("c0")]];
    if (name === "diverging") return [[0, css("c0")], [0.5, css("surface")], [1, css("c1")]];
    if (!alpha) return css(name);
    const [r, g, b] = [1, 3, 5].map((k) => parseInt(css(name).slice(k, k + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };
  // Colours stand at these keys only; a user's text that begins with @ is left alone.
  const themed = (value, key) => {
    if (typeof value === "string") return COLOURS.has(key) && value.startsWith("@") ? colour(value) : value;
    if (Array.isArray(value)) return value.map((entry) => themed(entry, ""));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
    return value;
  };

  // a phone has room for about this many letters below a plot; texts are escaped, so that a break is the only markup
  const folded = (words, most = 24) => words.split(" ").reduce((lines, word) => {
    const last = lines[lines.length - 1];
    if (last && last.length + word.length < most) lines[lines.length - 1] = `${last} ${word}`; else lines.push(word);
    return lines;
  }, []).join("<br>");

  const drawn = new Map(); // element → figure
  const draw = (element, plot) => {
    const figure = themed(plot, "");
    if (touch) figure.layout.dragmode = false; // a finger scrolls the page
    figure.layout.uirevision = "kept"; // a zoom survives new data
    if (narrow.matches) {
      figure.layout.font.size = 11;
      figure.layout.margin = { ...figure.layout.margin, l: 40, r: 8 };
      for (const [name, axis] of Object.entries(figure.layout)) if (name.startsWith("xaxis") && axis.title) axis.title.text = folded(axis.title.text);
      for (const trace of figure.data) if (trace.colorbar) trace.colorbar = { ...trace.colorbar, thickness: 8, title: { text: "" } };
    }
    drawn.set(element, plot);
    return Plotly.react(element, figure.data, figure.layout, { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
  };
  const again = () => { for (const [element, plot] of drawn) if (element.isConnected) draw(element, plot); else drawn.delete(element); };
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  return { draw };
})();
