"use strict";
// The run tab: curves of a run, where its time went, and how the predictions did.
(() => {
  const { el, ms, bytes, count, table, plot } = fxpar;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const HUES = ["--axis-cp", "--kind-reduce_scatter", "--axis-ep", "--axis-tp", "--axis-pp", "--axis-dp"];
  const hue = (i) => style(HUES[i % HUES.length]);
  const name = (group) => `≤ ${count(group.limit)}  ${group.strategy}`;
  const right = (title) => ({ title, right: true });
  const seconds = (value) => (value < 120 ? `${value.toFixed(1)} s` : value < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`);
  const loss = (value) => (value === null ? "no number" : value.toFixed(4));
  const small = { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, itemclick: "toggle", itemdoubleclick: false };

  function figure(label, value, more) {
    return el("div", { style: "min-width:120px" }, el("div", { class: "soft" }, label),
      el("div", { style: "font-size:18px;font-weight:600;font-variant-numeric:tabular-nums" }, value),
      more && el("div", { class: "soft" }, more));
  }

  function figures({ totals, environment }) {
    const held = totals.validation_loss === null ? null : `${loss(totals.validation_loss)} on held-out data`;
    return el("div", { class: "card" },
      el("div", { class: "row", style: "gap:12px 36px;align-items:flex-start" },
        figure("loss", `${loss(totals.first_loss)} → ${loss(totals.last_loss)}`, held),
        figure("valid tokens per second", count(Math.round(totals.tokens_per_s)), "mean of the run"),
        figure("steps", count(totals.steps), totals.skipped ? `${count(totals.skipped)} skipped` : null),
        figure("time", seconds(totals.wall_s), `${seconds(totals.cpu_s)} of CPU on all ranks`),
        figure("tokens", count(totals.tokens), `${count(totals.sequences)} sequences`)),
      el("p", { class: "soft", id: "run-environment", style: "margin:10px 0 0" }, environment.join("  ·  ")));
  }

  function chart(title, draw, wide, note) {
    const node = el("div", { style: "width:100%" });
    const card = el("div", { class: "card", "data-chart": title, style: `min-width:0;${wide ? "grid-column:1/-1" : ""}` },
      el("h2", { style: "margin:0 0 2px" }, title), note && el("div", { class: "soft" }, note), node);
    return { card, draw: () => draw(node) };
  }

  const line = (x, y, title, fill, extra = {}) => ({ type: "scatter", mode: x.length < 3 ? "lines+markers" : "lines", x, y,
    name: title, line: { color: fill, width: 1.6 }, hovertemplate: `%{y:.5~g}<extra>${title}, step %{x}</extra>`, ...extra });

  function drawLoss(node, { steps, curves, tasks }) {
    const traces = [line(steps, curves.loss, "training", style("--accent"))];
    Object.entries(tasks).forEach(([title, values], i) => traces.push(line(steps, values, title, hue(i), { opacity: 0.7 })));
    if (curves.validation_loss.some((value) => value !== null)) {
      traces.push(line(steps, curves.validation_loss, "held-out data", style("--kind-reduce_scatter"),
        { mode: "markers", marker: { symbol: "diamond", size: 8, color: style("--kind-reduce_scatter") } }));
    }
    plot(node, traces, { height: 240, showlegend: traces.length > 1, legend: small, xaxis: { title: { text: "step" } } });
  }

  function drawSpeed(node, { steps, curves }) {
    plot(node, [line(steps, curves.tokens_per_s, "tokens/s", style("--accent"))], { height: 240, showlegend: false,
      xaxis: { title: { text: "step" } }, yaxis: { rangemode: "tozero" } });
  }

  // One stack per step: what each group ran, then switches, reductions, optimizer, all else.
  function drawTimes(node, { steps, groups, times }) {
    const bar = (title, y, fill, shape, opacity = 1) => ({ type: "bar", x: steps, y, name: title, opacity,
      marker: { color: fill, line: { width: 0 }, pattern: { shape, size: 5, solidity: 0.35, fgcolor: style("--surface"), fillmode: "overlay" } },
      hovertemplate: `%{y:.4~g} ms<extra>${title}, step %{x}</extra>` });
    const some = (trace) => trace.y.some((value) => value > 0);
    const traces = [
      ...groups.map((group, i) => bar(name(group), group.ms.run, hue(i), "")),
      ...groups.map((group, i) => bar(`switch to ${group.strategy}`, group.ms.switch, hue(i), "/")),
      ...groups.map((group, i) => bar(`reduction of ${group.strategy}`, group.ms.reduce, hue(i), "\\")),
      bar("optimizer", times.optimizer, style("--compute"), "-"),
      bar("data, planning, the rest", times.other, style("--compute"), ".", 0.55),
    ].filter(some);
    plot(node, traces, { height: 320, barmode: "stack", bargap: steps.length > 120 ? 0 : 0.15, legend: small,
      xaxis: { title: { text: "step" } }, yaxis: { ticksuffix: " ms", rangemode: "tozero" } });
  }

  const short = (bound) => (bound >= 1024 && bound % 1024 === 0 ? `${bound / 1024}k` : String(bound));

  function drawLengths(node, { groups }) {
    const bounds = [...new Set(groups.flatMap((group) => group.lengths.map(([bound]) => bound)))].sort((a, b) => a - b);
    const total = groups.reduce((sum, group) => sum + group.sequences, 0);
    const label = (bound) => (bound > 2 ? `${short(bound / 2 + 1)}–${short(bound)}` : String(bound));
    const traces = groups.map((group, i) => {
      const found = new Map(group.lengths);
      return { type: "bar", name: name(group), x: bounds.map(label), y: bounds.map((bound) => found.get(bound) ?? 0),
        marker: { color: hue(i), pattern: { shape: ["", "/", ".", "x", "-", "|"][i % 6], size: 5, solidity: 0.3, fgcolor: style("--surface"), fillmode: "overlay" } },
        customdata: bounds.map((bound) => (100 * (found.get(bound) ?? 0)) / total),
        hovertemplate: `%{y} sequences of %{x} tokens (%{customdata:.1f}%)<extra>${name(group)}</extra>` };
    });
    plot(node, traces, { height: 280, barmode: "stack", bargap: 0.12, legend: small,
      xaxis: { title: { text: "tokens of a sequence" }, type: "category" }, yaxis: { title: { text: "sequences" } } });
  }

  function drawPredicted(node, { groups }) {
    const symbols = ["circle", "square", "diamond", "triangle-up", "x", "cross"];
    const traces = groups.filter((group) => group.points.length).map((group, i) => ({ type: "scatter", mode: "markers", name: name(group),
      x: group.points.map(([predicted]) => predicted), y: group.points.map(([, measured]) => measured),
      marker: { color: hue(i), size: 6, symbol: symbols[i % symbols.length], opacity: 0.75 },
      hovertemplate: `predicted %{x:.4~g} ms, measured %{y:.4~g} ms<extra>${name(group)}</extra>` }));
    const all = traces.flatMap((trace) => [...trace.x, ...trace.y]);
    const ends = [Math.min(...all) * 0.8, Math.max(...all) * 1.25];
    traces.push({ type: "scatter", mode: "lines", x: ends, y: ends, name: "measured = predicted", hoverinfo: "skip",
      line: { color: style("--soft"), width: 1, dash: "dot" } });
    const axis = (text) => ({ type: "log", title: { text }, ticksuffix: " ms", dtick: ends[1] / ends[0] > 40 ? 1 : undefined });
    plot(node, traces, { height: 280, hovermode: "closest", legend: small, xaxis: axis("predicted"), yaxis: axis("measured") });
  }

  function groupTable({ groups, totals }) {
    const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)}%` : "–");
    const ratio = (group, phase) => (group.predicted[phase] > 0 ? `${(group.measured[phase] / group.predicted[phase]).toFixed(2)}×` : "–");
    const phase = (group, part) => [ms(group.predicted[part] ?? 0), ms(group.measured[part] ?? 0), ratio(group, part)];
    const rows = groups.map((group) => [name(group), count(group.steps), count(group.sequences),
      `${count(group.tokens)} (${share(group.tokens, totals.tokens)})`,
      ...phase(group, "run"), ...phase(group, "switch"), bytes(group.switch_bytes ?? 0), ...phase(group, "reduce"), bytes(group.reduce_bytes ?? 0)]);
    const columns = [{ title: "group" }, right("steps"), right("sequences"), right("tokens"),
      ...["run", "switch", "reduce"].flatMap((part) => [right(`${part}, predicted`), right("measured"), right("ratio"),
        ...(part === "run" ? [] : [right(part === "switch" ? "moved" : "sent")])])];
    return el("div", { class: "card", style: "overflow-x:auto" }, el("h2", {}, "Groups: predicted and measured"),
      table(columns, rows, { "data-groups": "", style: "white-space:nowrap" }),
      el("p", { class: "soft", style: "margin:8px 0 0" }, "Means of the steps in which a group ran, without the first step; " +
        "ratio: measured over predicted. Times are rank 0's, bytes those of all ranks. " +
        "The plan of a mini-batch needs the proportions between groups, not the absolute times."));
  }

  function comparisonCard(found) {
    if (!found) return null;
    const rows = [
      ["wall time", seconds(found.hot_s), seconds(found.static_s), `${found.speedup.toFixed(2)}×`],
      ["valid tokens per second", count(Math.round(found.hot_tokens_per_s)), count(Math.round(found.static_tokens_per_s)),
        `${(found.hot_tokens_per_s / found.static_tokens_per_s).toFixed(2)}×`],
      ["CPU time, all ranks", seconds(found.hot_cpu_ms / 1e3), seconds(found.static_cpu_ms / 1e3), `${(found.static_cpu_ms / found.hot_cpu_ms).toFixed(2)}×`],
    ];
    const verdict = found.agrees ? "agree" : "DIFFER";
    return el("div", { class: "card", "data-comparison": "" }, el("h2", {}, `Compared with ${found.strategy} alone`),
      table([{ title: `${found.steps} steps` }, right("several strategies"), right(`${found.strategy} alone`), right("gain")], rows),
      el("p", { class: "soft", style: "margin:8px 0 0" }, `The losses ${verdict}: largest relative difference ` +
        `${found.loss_diff.toExponential(1)}, at step ${found.loss_diff_step} (bound ${found.tolerance.toExponential(0)}).`));
  }

  function render(root, section) {
    const per = section.steps_per_point > 1 ? `means of ${section.steps_per_point} steps` : null;
    const charts = [
      chart("Loss", (node) => drawLoss(node, section), false, per),
      chart("Valid tokens per second", (node) => drawSpeed(node, section), false, per),
      chart("Time of a step", (node) => drawTimes(node, section), true, per),
    ];
    if (section.groups.some((group) => group.lengths.length)) {
      charts.push(chart("Lengths of sequences", (node) => drawLengths(node, section), false));
    }
    if (section.groups.some((group) => group.points.length)) {
      charts.push(chart("Micro-batches of a group, predicted and measured", (node) => drawPredicted(node, section), false));
    }
    const grid = el("div", { style: "display:grid;grid-template-columns:repeat(auto-fit,minmax(max(380px,40%),1fr));gap:12px;margin:12px 0" },
      charts.map((one) => one.card));
    root.append(figures(section), grid, groupTable(section), el("div", { style: "height:12px" }), ...[comparisonCard(section.comparison)].filter(Boolean));
    for (const one of charts) one.draw();
  }

  fxpar.register("run", "Run", render);
})();
