"use strict";
// Pages behind the hash, filled from api/… Names and words only ever become text nodes, never markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, words = "", attributes = {}) => {
    const element = document.createElement(tag);
    if (words !== "") element.textContent = words;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const ask = async (path, values = []) => {
    const answer = await fetch(`api/${path}?${new URLSearchParams(values)}`, { cache: "no-store" });
    const found = await answer.json();
    if (!answer.ok) throw Object.assign(new Error(found.error || answer.statusText), { answered: true });
    return found;
  };
  const trouble = (words) => { $("trouble").hidden = !words; $("trouble").textContent = words || ""; };
  // a promise in few digits is rounded up
  const upper = (value, digits) => {
    const near = Number(value.toPrecision(digits));
    return near >= value ? near : Number((near + 10 ** (Math.floor(Math.log10(Math.abs(value))) - digits + 1)).toPrecision(digits));
  };
  const eps = (value) => (value === "inf" ? "∞" : value === null ? "checking…" : String(upper(value, 4)));
  const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
  const small = (value) => (value === null ? "–" : upper(value, 2).toExponential(1).replace(".0e", "e"));
  const state = (word) => make("span", word, { class: `state ${word}` });
  const link = (name) => make("a", name, { href: `#run/${encodeURIComponent(name)}` });

  // --- runs --------------------------------------------------------------------------------------------------------
  const chosen = new Set();
  const COLUMNS = [
    ["run", (r) => link(r.name)], ["state", (r) => state(r.state)], ["ε", (r) => eps(r.epsilon), "number"],
    ["δ", (r) => small(r.delta), "number wide"], ["accuracy", (r) => share(r.accuracy), "number"],
    ["steps", (r) => (r.planned ? `${r.steps} of ${r.planned}` : String(r.steps)), "number wide"],
    ["mechanism", (r) => r.mechanism ?? "–", "wide"], ["network", (r) => r.model ?? "–", "wide"], ["data", (r) => r.data ?? "–", "wide"],
  ];
  const heads = (row) => row.append(...COLUMNS.map(([name, , kind = ""]) => make("th", name, { scope: "col", class: kind })));
  const cells = (r) => COLUMNS.map(([, value, kind = ""]) => {
    const cell = make("td", "", { class: kind });
    cell.append(value(r));
    if (value === COLUMNS[0][1] && r.problem) cell.append(make("div", r.problem, { class: "quiet" }));
    return cell;
  });
  heads($("runs-table").tHead.rows[0]);
  heads($("compare-table").tHead.rows[0]);

  let known = [];
  const showRuns = () => {
    const wanted = $("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const focused = document.activeElement?.dataset?.run;
    const rows = known.filter((r) => { const text = [r.name, r.mechanism, r.data, r.state, r.model].join(" ").toLowerCase(); return wanted.every((w) => text.includes(w)); });
    $("runs-table").tBodies[0].replaceChildren(...rows.map((r) => {
      const row = make("tr"), first = make("td"), box = make("input", "", { type: "checkbox", "aria-label": `choose ${r.name}`, "data-run": r.name });
      box.checked = chosen.has(r.name);
      first.append(box);
      row.append(first, ...cells(r));
      return row;
    }));
    if (focused !== undefined) [...document.querySelectorAll("[data-run]")].find((e) => e.dataset.run === focused)?.focus();
    $("empty").hidden = known.length > 0;
    $("compare-button").disabled = chosen.size < 2;
  };
  const loadRuns = async () => {
    const found = await ask("runs");
    const before = new Map(known.map((r) => [r.name, r.state]));
    for (const r of found.runs) if (before.has(r.name) && before.get(r.name) !== r.state) $("said").textContent = `${r.name}: ${r.state}`;
    const running = found.runs.filter((r) => r.state === "running").length;
    $("subtitle").textContent = `${found.runs.length} in ${found.folder}${running ? `, ${running} running` : ""}. Read-only, on this machine alone.`;
    if (JSON.stringify(found.runs) === JSON.stringify(known) && known.length) return;
    known = found.runs;
    showRuns();
  };
  $("runs-table").addEventListener("change", (event) => {
    const name = event.target.dataset.run;
    if (event.target.checked) chosen.add(name); else chosen.delete(name);
    $("compare-button").disabled = chosen.size < 2;
  });
  $("filter").addEventListener("input", showRuns);
  $("chosen-bar").addEventListener("submit", (event) => { event.preventDefault(); location.hash = "compare"; });

  // --- figures -----------------------------------------------------------------------------------------------------
  const table = (head, body) => {
    const scroll = make("div", "", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Data" }), t = make("table"), top = make("thead"), rows = make("tbody"), line = make("tr");
    line.append(...head.map((h) => make("th", h, { scope: "col" })));
    top.append(line);
    rows.append(...body.map((cells) => { const row = make("tr"); row.append(...cells.map((c) => make("td", c))); return row; }));
    t.append(top, rows);
    scroll.append(t);
    return scroll;
  };
  const showFigures = (place, figures) => {
    const keys = figures.map((f) => f.key).join(" ");
    if (place.dataset.keys !== keys) {
      place.dataset.keys = keys;
      place.replaceChildren(...figures.map((f) => {
        const figure = make("figure", "", { class: "figure", "aria-labelledby": `${place.id}-${f.key}-title` });
        const details = make("details", "", { class: "data" });
        details.append(make("summary", "Data of this figure"), make("div"));
        figure.append(make("h2", f.title, { id: `${place.id}-${f.key}-title`, class: "figure-title" }), make("div", "", { class: "plot", role: "img", "data-figure": f.key, style: `min-height: ${f.height}px` }), make("figcaption", f.caption), details);
        return figure;
      }));
    }
    figures.forEach((f, k) => {
      const figure = place.children[k], plot = figure.querySelector(".plot");
      plot.setAttribute("aria-label", f.alt);
      figure.querySelector("figcaption").textContent = f.caption;
      figure.querySelector("details").lastChild.replaceChildren(table(f.head, f.body));
      Figures.draw(plot, f.plot);
    });
  };

  // --- one run -----------------------------------------------------------------------------------------------------
  const cards = (pairs) => {
    const list = make("dl", "", { class: "cards" });
    for (const [name, value] of pairs) { const box = make("div"), words = make("dd"); words.append(value); box.append(make("dt", name), words); list.append(box); }
    return list;
  };
  const showRun = (r) => {
    const head = [];
    if (r.statement) {
      const box = make("div", "", { class: `statement ${r.statement.tone}` });
      box.append(make("p", r.statement.headline, { class: "headline" }), ...r.statement.sentences.map((s) => make("p", s)), ...r.statement.warnings.map((s) => make("p", s, { class: "warning" })));
      head.push(box);
    }
    if (r.problem) head.push(make("p", r.problem, { class: "warning" }));
    const spent = r.state === "finished" ? "ε" : "ε reserved";
    head.push(cards([["State", state(r.state)], [`${spent} (δ = ${small(r.delta)})`, eps(r.epsilon)], ["Test accuracy", share(r.accuracy)], ["Steps evaluated", r.planned ? `${r.steps} of ${r.planned}` : String(r.steps)], ["Mechanism", r.mechanism ?? "–"]]));
    if (r.planned && r.state !== "finished") head.push(make("progress", "", { max: r.planned, value: r.steps, "aria-label": "training" }));
    if (r.state === "running" && !r.figures.length) head.push(make("p", "Curves appear after the second evaluation.", { class: "quiet" }));
    if (r.state === "interrupted") head.push(make("p", "The run stopped before its end. Go on with: erlangen train --resume FOLDER", { class: "quiet" }));
    $("run-head").replaceChildren(...head);
    showFigures($("run-figures"), r.figures);
    if (!$("run-options").children.length && r.options.length) {
      const details = make("details", "", { class: "data" });
      details.append(make("summary", "Every option of this run"), table(["option", "value"], r.options));
      $("run-options").append(details);
    }
  };
  const loadRun = async (name) => {
    const found = await ask("run", [["name", name]]);
    if (location.hash !== `#run/${encodeURIComponent(name)}`) return false;
    showRun(found);
    return found.state === "running" || found.state === "interrupted";
  };

  // --- comparison --------------------------------------------------------------------------------------------------
  const loadCompare = async () => {
    $("compare-hint").hidden = chosen.size > 1;
    $("compare-scroll").hidden = chosen.size < 2;
    if (chosen.size < 2) { showFigures($("compare-figures"), []); $("compare-notes").replaceChildren(); return false; }
    const found = await ask("compare", [...chosen].map((name) => ["name", name]));
    $("compare-notes").replaceChildren(...found.notes.map((words) => make("p", words, { class: "warning" })));
    showFigures($("compare-figures"), found.figures);
    $("compare-table").tBodies[0].replaceChildren(...found.rows.map((r) => { const row = make("tr"); row.append(...cells(r)); return row; }));
    return found.rows.some((r) => r.state === "running");
  };

  // --- calculator --------------------------------------------------------------------------------------------------
  // name, label, lowest, highest, start, hint; sliders are logarithmic
  const DIALS = [
    ["sigma", "σ, noise multiplier", 0.3, 50, 1, "standard deviation of the noise over the clipping bound", "cost"],
    ["target", "ε, target", 0.1, 50, 3, "what may be spent in all", "noise"],
    ["rate", "q, sampling rate", 1e-5, 1, 0.01, "expected batch over the number of records", ""],
    ["steps", "T, steps", 1, 1e6, 1000, "number of noisy updates", ""],
    ["delta", "δ", 1e-10, 1e-3, 1e-5, "below one over the number of records", ""],
  ];
  const plan = {};
  const place = (low, high, value) => Math.round((1000 * Math.log(value / low)) / Math.log(high / low));
  const tidy = (name, value) => (name === "steps" ? String(Math.max(1, Math.round(Number(value.toPrecision(3))))) : String(Number(value.toPrecision(3))));
  for (const [name, words, low, high, start, hint, only] of DIALS) {
    const box = make("div", "", { class: "dial", "data-only": only }), label = make("label", "", { for: `in-${name}` });
    const text = make("input", "", { type: "text", id: `in-${name}`, inputmode: "decimal", autocomplete: "off", "aria-describedby": `hint-${name}` });
    const slide = make("input", "", { type: "range", min: "0", max: "1000", "aria-label": `${words}, slider` });
    const valued = (value) => { plan[name] = value; slide.setAttribute("aria-valuetext", value); };
    text.value = tidy(name, start);
    slide.value = place(low, high, start);
    valued(text.value);
    text.addEventListener("input", () => { if (Number(text.value) > 0) slide.value = place(low, high, Number(text.value)); valued(text.value.trim()); price(); });
    slide.addEventListener("input", () => { text.value = tidy(name, low * (high / low) ** (slide.value / 1000)); valued(text.value); price(); });
    label.append(make("span", words), text);
    box.append(label, slide, make("p", hint, { class: "quiet", id: `hint-${name}` }));
    $("dials").append(box);
  }
  const WORDS = { good: "", careful: "A weak guarantee. ", bad: "No guarantee. " };
  const direction = () => new FormData($("plan")).get("ask");
  const shown = (found, exact) => {
    const known = direction() === "cost";
    $("answer").className = `statement ${found.tone}`;
    $("answer-head").textContent = known ? `ε ${exact ? "=" : "≤"} ${eps(found.epsilon)}` : `σ = ${upper(found.sigma, 4)}`;
    const odds = found.epsilon === "inf" ? "∞" : found.epsilon > 50 ? `10^${Math.ceil(found.epsilon / Math.LN10)}` : upper(Math.exp(found.epsilon), 3).toLocaleString("en");
    $("answer-words").textContent = `${known ? "" : `It gives ε = ${eps(found.epsilon)} at δ = ${found.delta}. `}${WORDS[found.tone]}No outcome is more than ${odds} times (eᵋ) as likely with any one record as without, plus δ, nor the other way round.`;
    $("answer-note").textContent = exact ? "by PLD" : "a quick bound by RDP; PLD follows";
    $("attacks").tBodies[0].replaceChildren(...found.attacker.map((a) => { const row = make("tr"); row.append(make("td", `${100 * a.fpr} %`), make("td", share(Math.ceil(1000 * a.tpr) / 1000))); return row; }));
    const rest = `--sample-rate ${plan.rate} --steps ${plan.steps} --delta ${plan.delta}`;
    $("command").textContent = known ? `erlangen account --noise-multiplier ${plan.sigma} ${rest}` : `erlangen calibrate --epsilon ${plan.target} ${rest}`;
  };
  let busy = false, stale = false;
  const price = async () => { // one question at a time; the newest values are asked when the last answer is there
    stale = true;
    if (busy) return;
    busy = true;
    while (stale) {
      stale = false;
      const asked = direction(), values = Object.entries(plan);
      $("answer").classList.add("waiting");
      try {
        if (asked === "cost") { const quick = await ask("cost", [...values, ["method", "rdp"]]).catch((e) => { if (!e.answered) throw e; }); if (!stale && quick) shown(quick, false); }
        if (stale) continue;
        const found = await ask(asked, values);
        if (!stale) shown(found, true);
        trouble("");
      } catch (error) {
        if (!stale) { $("answer").className = "statement careful"; $("answer-head").textContent = "–"; $("answer-words").textContent = error.message; $("answer-note").textContent = ""; $("attacks").tBodies[0].replaceChildren(); }
      }
    }
    $("answer").classList.remove("waiting");
    busy = false;
  };
  const turn = () => { for (const box of document.querySelectorAll(".dial")) box.hidden = box.dataset.only !== "" && box.dataset.only !== direction(); price(); };
  $("plan").addEventListener("change", (event) => { if (event.target.name === "ask") turn(); });
  $("plan").addEventListener("submit", (event) => event.preventDefault());

  // --- pages -------------------------------------------------------------------------------------------------------
  const TITLES = { runs: "Runs", compare: "Compare", calculator: "Privacy calculator" };
  let timer = 0;
  const follow = async (load, wait) => { // again and again while the page is shown; `load` says whether there is more to come
    const at = location.hash;
    let more = true;
    try { more = (await load()) !== false; trouble(""); } catch (error) { trouble(error.answered ? error.message : "The server does not answer. Is erlangen ui still running?"); }
    if (location.hash === at && more) timer = setTimeout(() => follow(load, wait), document.hidden ? 5 * wait : wait);
  };
  const open = (first) => {
    clearTimeout(timer);
    if (location.hash === "#main") return;
    const [page, name] = (location.hash.slice(1) || "runs").split("/", 2);
    const which = page in TITLES || page === "run" ? page : "runs";
    for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== `page-${which}`;
    for (const anchor of document.querySelectorAll("nav a")) if (anchor.dataset.page === which) anchor.setAttribute("aria-current", "page"); else anchor.removeAttribute("aria-current");
    const title = which === "run" ? decodeURIComponent(name ?? "") : TITLES[which];
    $("title").textContent = title;
    document.title = `${title}: Erlangen`;
    trouble("");
    if (which !== "runs") $("subtitle").textContent = "Read-only, on this machine alone.";
    if (first !== true) { scrollTo(0, 0); $("title").focus({ preventScroll: true }); }
    if (which === "runs") { known = []; follow(loadRuns, 2500); }
    if (which === "run") { $("run-head").replaceChildren(); $("run-options").replaceChildren(); showFigures($("run-figures"), []); follow(() => loadRun(title), 2000); }
    if (which === "compare") follow(loadCompare, 2500);
    if (which === "calculator") turn();
  };
  addEventListener("hashchange", open);
  open(true);
})();
