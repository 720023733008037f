"use strict";
// The shell of the page: data, tabs, strategies, theme, and what all tabs draw with.
//
// A tab is a file that calls fxpar.register(id, title, render). `render(root, section, view)` fills the empty element
// `root`: when the tab is opened first, and again after the strategy or the theme has changed. `section` is
// data.sections[id], `view` its part for the chosen strategy (section.by_strategy[...], or all of it). What a tab
// remembers between two calls it keeps in variables of its own.
window.fxpar = (() => {
  const data = JSON.parse(document.getElementById("fxpar-view").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const tabs = new Map(); // id -> {title, render, panel, button, stale}
  const listeners = [];
  let current = null;
  let strategy = data.strategies[0] ?? null;

  // ------------------------------------------------------------------------------------------------- elements
  // el("div", {class: "box", "data-id": 3, onclick: f}, "text", child, [more]); "svg:rect" makes an SVG element.
  // Attributes that are null, undefined or false are left out.
  function el(tag, attributes = {}, ...children) {
    const node = tag.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  // A button's behaviour for an element that is none: click, Enter and Space.
  function pressable(node, action) {
    node.tabIndex = 0;
    node.addEventListener("click", action);
    node.addEventListener("keydown", (event) => {
      if (event.target !== node || (event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      action(event);
    });
    return node;
  }

  // -------------------------------------------------------------------------------------------------- numbers
  function scaled(value, units, digits = 3) {
    let [unit, size] = [units[0], Number(value)];
    for (const next of units.slice(1)) {
      if (Math.abs(size) < 999.5) break;
      [unit, size] = [next, size / 1000];
    }
    const text = Math.abs(size) >= 99.95 || Number.isInteger(size) ? size.toFixed(0) : size.toPrecision(digits);
    return unit ? `${text} ${unit}` : text;
  }
  const bytes = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB", "PB"]); // 1500000 -> "1.50 MB"; powers of 1000
  const flops = (n) => scaled(n, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
  const count = (n) => Number(n).toLocaleString("en-US"); // 1234567 -> "1,234,567"
  function ms(x) {
    if (x === 0) return "0 ms";
    if (Math.abs(x) < 0.9995) return `${(x * 1000).toPrecision(Math.abs(x) < 0.001 ? 1 : 3)} µs`;
    return Math.abs(x) < 999.5 ? `${x.toPrecision(3)} ms` : `${(x / 1000).toPrecision(3)} s`;
  }

  // --------------------------------------------------------------------------------------------------- colours
  // One accent per kind of communication, one per mesh axis; each kind has a code as well, for eyes and paper
  // without colour. `colour.all_gather`, `axisColour.tp` are the values of the theme that is shown.
  const CODES = { all_gather: "AG", reduce_scatter: "RS", all_reduce: "AR", all_to_all: "A2A", shift: "SH", send: "P2P" };
  const styled = (prefix) =>
    new Proxy({}, {
      get: (_, name) => {
        const style = getComputedStyle(document.documentElement);
        return style.getPropertyValue(`--${prefix}-${String(name)}`).trim() || style.getPropertyValue("--compute").trim();
      },
    });
  const colour = styled("kind");
  const axisColour = styled("axis");
  const code = (kind) => CODES[kind] ?? kind;
  const words = (kind) => kind.replaceAll("_", " ");

  // A chip: the code of a kind of communication in its colour, and a text.
  function chip(kind, text, attributes = {}) {
    return el("span", { class: "chip", "data-kind": kind, title: words(kind), ...attributes },
      el("b", {}, code(kind)), text ? el("span", {}, text) : null);
  }

  // An axis of the mesh in its colour; of axes joined by "." one for each.
  function axes(text) {
    return text.split(".").map((name) => el("span", { class: "axis own", "data-axis": name.split(":")[0] }, name));
  }

  // A placed type such as "bf16[T@cp, 64@tp] P(dp)": axes in their colours, partial ones hatched.
  function placed(text) {
    const node = el("span", { class: "placed" });
    let from = 0;
    for (const match of text.matchAll(/@(\w+)((?:\*\d+)|(?:\([\d:]+\)))?|P\((\w+)[^)]*\)/g)) {
      node.append(text.slice(from, match.index));
      const axis = match[1] ?? match[3];
      node.append(el("span", { class: match[3] ? "axis partial" : "axis", "data-axis": axis }, match[0]));
      from = match.index + match[0].length;
    }
    node.append(text.slice(from));
    return node;
  }

  // --------------------------------------------------------------------------------------------------- tooltips
  const tipBox = el("div", { id: "tip", role: "tooltip", hidden: true });
  // tip(node, content): content is a text, or a function that returns a text or an element.
  function tip(node, content) {
    const show = () => {
      const made = typeof content === "function" ? content() : content;
      if (!made) return;
      tipBox.replaceChildren(made);
      tipBox.hidden = false;
      const [at, size] = [node.getBoundingClientRect(), tipBox.getBoundingClientRect()];
      const below = at.bottom + 6 + size.height < innerHeight;
      tipBox.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
      tipBox.style.top = `${Math.max(8, below ? at.bottom + 6 : at.top - size.height - 6)}px`;
    };
    for (const event of ["mouseenter", "focus"]) node.addEventListener(event, show);
    for (const event of ["mouseleave", "blur", "click"]) node.addEventListener(event, hideTip);
    return node;
  }
  function hideTip() {
    tipBox.hidden = true;
  }

  // A table: columns are {title, right}, rows are lists of texts or elements.
  function table(columns, rows, attributes = {}) {
    const cell = (tag, content, column) => el(tag, { class: column.right ? "right" : null }, content);
    return el("table", { class: "table", ...attributes },
      el("thead", {}, el("tr", {}, columns.map((column) => cell("th", column.title, column)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((content, i) => cell("td", content, columns[i]))))));
  }

  // ----------------------------------------------------------------------------------------------------- plots
  // Draws with plotly in the page's theme; `layout` and `config` win over it. Returns plotly's promise.
  function plot(node, traces, layout = {}, config = {}) {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: value("--line"), zerolinecolor: value("--line-strong"), linecolor: value("--line-strong"),
      automargin: true, title: { standoff: 8 } };
    const whole = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: value("--sans"), size: 12, color: value("--ink") },
      margin: { l: 56, r: 16, t: 12, b: 40 },
      hoverlabel: { bgcolor: value("--raised"), bordercolor: value("--line-strong"),
        font: { family: value("--mono"), size: 12, color: value("--ink") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: value("--soft"), activecolor: value("--accent") },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      ...layout,
    };
    for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))])) {
      whole[name] = { ...axis, ...layout[name] };
    }
    const shown = node.isConnected;
    const done = window.Plotly.react(node, traces, whole, {
      responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], ...config });
    // What is drawn before it stands in the page has no room to fit in yet.
    if (!shown) requestAnimationFrame(() => node.offsetParent && window.Plotly.Plots.resize(node));
    return done;
  }

  // ---------------------------------------------------------------------------------------------- tabs and page
  function register(id, title, render) {
    if (data.sections[id] !== undefined) tabs.set(id, { title, render, stale: true });
  }

  function draw(id) {
    const tab = tabs.get(id);
    if (!tab.stale) return;
    tab.stale = false;
    hideTip();
    tab.panel.replaceChildren();
    const section = data.sections[id];
    try {
      tab.render(tab.panel, section, section.by_strategy?.[strategy] ?? section);
    } catch (error) {
      console.error(error);
      tab.panel.replaceChildren(el("p", { class: "failed", role: "alert" }, `This tab could not be drawn: ${error}`));
    }
  }

  function open(id) {
    current = id;
    for (const [name, tab] of tabs) {
      const chosen = name === id;
      tab.button.setAttribute("aria-selected", String(chosen));
      tab.button.tabIndex = chosen ? 0 : -1;
      tab.panel.hidden = !chosen;
    }
    draw(id);
    remember();
  }

  function choose(text) {
    if (text === strategy) return;
    strategy = text;
    for (const button of document.querySelectorAll("[data-strategy]")) {
      const chosen = button.dataset.strategy === text;
      button.setAttribute("aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
    showAbout();
    refresh();
    for (const listener of listeners) listener(text);
  }

  function refresh() {
    for (const tab of tabs.values()) tab.stale = true;
    if (current) draw(current);
    remember();
  }

  // The address names the tab and the strategy, so that a place in the page can be passed on.
  function remember() {
    history.replaceState(null, "", `#${current}${strategy ? `/${encodeURIComponent(strategy)}` : ""}`);
  }

  function remembered() {
    const [tab, text] = location.hash.slice(1).split("/");
    return [tabs.has(tab) ? tab : [...tabs.keys()][0], text ? decodeURIComponent(text) : ""];
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    const button = document.getElementById("theme");
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Show in ${name === "dark" ? "light" : "dark"} colours`);
  }
  const theme = () => document.documentElement.dataset.theme;

  function showAbout() {
    const rows = [...(data.about?.[strategy] ?? [])];
    const over = Object.entries(data.sent_by_axis?.[strategy] ?? {});
    if (over.length) rows.push(["over", over.map(([axis, sent]) => sentOver(axis, sent))]);
    document.getElementById("about").replaceChildren(
      ...rows.flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, ...[value].flat())]));
  }

  // What a rank sends over an axis: per micro-batch, and once per mini-batch.
  function sentOver(axis, sent) {
    const parts = [sent.micro_batch_bytes ? bytes(sent.micro_batch_bytes) : "", sent.mini_batch_bytes ? `${bytes(sent.mini_batch_bytes)} once` : ""];
    return el("span", { class: "fact", "data-sent-over": axis }, axes(axis), ` ${parts.filter(Boolean).join(" + ") || "0 B"}`);
  }

  // Left and right arrows move between the buttons of a row.
  function arrows(row) {
    row.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const buttons = [...row.querySelectorAll("button")];
      const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
      next.click();
      next.focus();
    });
    return row;
  }

  function strategyRow() {
    if (data.strategies.length < 2) return strategy ? el("span", { class: "only", id: "strategies" }, strategy) : null;
    const buttons = data.strategies.map((text) =>
      el("button", { type: "button", role: "radio", "data-strategy": text, "aria-checked": String(text === strategy),
        tabindex: text === strategy ? 0 : -1, onclick: () => choose(text) }, text));
    return arrows(el("div", { class: "pills", id: "strategies", role: "radiogroup", "aria-label": "Strategy" }, buttons));
  }

  function tabRow() {
    for (const [id, tab] of tabs) {
      tab.button = el("button", { type: "button", role: "tab", id: `tab-${id}`, "data-tab": id, "aria-controls": `panel-${id}`,
        onclick: () => open(id) }, tab.title);
      tab.panel = el("section", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, hidden: true });
    }
    return arrows(el("nav", { class: "tabs", role: "tablist", "aria-label": "Views" }, [...tabs.values()].map((tab) => tab.button)));
  }

  function start() {
    const row = tabRow();
    const [tab, text] = remembered();
    if (data.strategies.includes(text)) strategy = text;
    const title = el("div", { class: "title" }, el("h1", {}, data.title), el("dl", { id: "about" }));
    const button = el("button", { type: "button", id: "theme", onclick: () => {
      setTheme(theme() === "dark" ? "light" : "dark");
      refresh();
    } });
    const notes = (data.notes ?? []).map((note) => el("p", { class: "note" }, note));
    document.body.append(
      el("header", {}, title, el("div", { class: "bar" }, row, strategyRow(), button)),
      el("main", {}, notes, [...tabs.values()].map((one) => one.panel)),
      el("footer", {}, data.made_with), tipBox);
    setTheme(dark.matches ? "dark" : "light");
    showAbout();
    dark.addEventListener("change", () => {
      setTheme(dark.matches ? "dark" : "light");
      refresh();
    });
    document.addEventListener("scroll", hideTip, true);
    if (tab) open(tab);
    document.documentElement.dataset.ready = "true";
  }

  return { data, register, start, open, el, pressable, table, tip, hideTip, chip, axes, placed, plot,
    bytes, flops, ms, count, colour, axisColour, code, words, theme,
    strategy: () => strategy, choose, onStrategy: (listener) => listeners.push(listener) };
})();
