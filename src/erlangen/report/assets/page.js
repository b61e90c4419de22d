"use strict";
// Draws each figure when it comes near the screen, and all of them before printing.
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const elements = [...document.querySelectorAll("[data-figure]")];
  const draw = (element) => {
    element.dataset.drawn = "yes";
    return Figures.draw(element, specs[element.dataset.figure]);
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "800px" });
  elements.forEach((element) => watcher.observe(element));
  addEventListener("beforeprint", () => elements.forEach(draw));
})();
