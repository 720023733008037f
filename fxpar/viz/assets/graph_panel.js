"use strict";
// The side panel of the graph tab: what is known of the selected box, of an edge, or of the whole part.
(() => {
  const { el, bytes, flops, ms, count, chip, axes, placed, table } = fxpar;

  // panel(part, box, go): `go(part, node or box)` leads to another place.
  function panel(part, box, go) {
    if (!box || box === part.root) return whole(part);
    if (box.kind === "node") return nodePanel(box.node, part, go);
    if (box.kind === "input") return inputPanel(box, part, go);
    if (box.kind === "output") return [heading("Output", box.name), facts(nodeFacts(box.node)), links("Made by", [box.node], part, go)];
    return modulePanel(box, part, go);
  }

  const heading = (kind, text) => el("header", {}, el("span", { class: "soft" }, kind), el("h2", { class: "mono" }, text));

  // A list of (label, content) pairs; those without content are left out.
  function facts(pairs) {
    const shown = pairs.filter(([, content]) => content !== "" && content !== null && content !== undefined);
    return el("dl", { class: "facts" }, shown.flatMap(([label, content]) => [el("dt", {}, label), el("dd", {}, content)]));
  }

  function section(title, ...content) {
    return el("section", {}, el("h3", {}, title), content);
  }

  function whole(part) {
    const { sums } = part.root;
    return [
      heading(part.about, part.place),
      facts([["nodes", count(sums.nodes)], ["FLOPs", sums.flops ? `${flops(sums.flops)} per rank` : ""],
        ["predicted", time(sums)]]),
      traffic(sums),
      legend(),
      params(part.strategy.paramsOf("", part.stage)),
    ];
  }

  function modulePanel(box, part, go) {
    const of = box.kind === "run" ? `own ops of ${box.fqn || "the model"}` : "module";
    const inside = part.children(box).filter((child) => child.kind === "module");
    return [
      heading(of, box.kind === "run" ? box.name : box.fqn),
      facts([["nodes", count(box.sums.nodes)], ["FLOPs", box.sums.flops ? `${flops(box.sums.flops)} per rank` : ""],
        ["predicted", time(box.sums)]]),
      traffic(box.sums),
      box.kind === "module" ? params(part.strategy.paramsOf(box.fqn, part.stage)) : null,
      inside.length ? section("Inside", el("ul", { class: "links" }, inside.map((child) => el("li", {}, link(child.name, () => go(part, child)))))) : null,
    ];
  }

  const time = (sums) => (sums.ms ? `${ms(sums.ms)}, of it ${ms(sums.wires.reduce((t, wire) => t + wire[4], 0))} communication` : "");

  function traffic(sums) {
    if (!sums.wires.length) return section("Communication", el("p", { class: "soft" }, "None."));
    const rows = sums.wires.map(([kind, axis, calls, sent, spent]) => [chip(kind), axes(axis), count(calls), bytes(sent), ms(spent)]);
    return section("Communication", table([{ title: "kind" }, { title: "axis" }, { title: "calls", right: true },
      { title: "sent", right: true }, { title: "predicted", right: true }], rows));
  }

  // `dp R, tp S(1)`: how a value lies on each axis, a chip for each.
  function lies(text) {
    return text.split(/, (?=\w+ )/).map((one) => {
      const [axis, ...how] = one.split(" ");
      return el("span", { class: "fact mono", "data-lies-on": axis }, axes(axis), ` ${how.join(" ")}`);
    });
  }

  // Parameters of layers that lie alike share a line.
  function params(list) {
    if (!list.length) return null;
    const rows = new Map();
    for (const param of list) {
      const name = param.fqn.replace(/\.\d+(?=\.)/g, ".*");
      const key = `${name} ${param.type}`;
      const row = rows.get(key) ?? { name, param, times: 0 };
      row.times += 1;
      rows.set(key, row);
    }
    const total = list.reduce((sum, param) => sum + param.bytes, 0);
    return section(`Parameters, ${bytes(total)} per rank`,
      el("ul", { class: "params" }, [...rows.values()].map(({ name, param, times }) =>
        el("li", {}, el("div", {}, el("span", { class: "mono" }, name), times > 1 ? el("span", { class: "soft" }, ` × ${times}`) : null),
          placed(param.type), param.type !== param.local ? el("span", { class: "soft mono" }, ` local ${param.local}`) : null))));
  }

  function nodeFacts(node) {
    const wire = node.wire;
    return [
      ["module", node.fqn || "the model itself"],
      ["type", placed(node.type)],
      ["on each axis", node.axes ? lies(node.axes) : ""],
      ["local", node.local ? el("span", { class: "mono" }, node.local) : ""],
      ["bytes per rank", node.bytes ? bytes(node.bytes) : ""],
      ["FLOPs", node.flops ? flops(node.flops) : ""],
      ["sends", wire ? [chip(wire.kind, bytes(wire.bytes)), " over ", axes(wire.axis)] : ""],
      ["tensors", wire && wire.fused > 1 ? `${wire.fused} in one call` : ""],
      ["predicted", node.ms ? ms(node.ms) : ""],
      ["source", node.source ? el("span", { class: "mono" }, node.source) : ""],
      ["made by", node.why],
    ];
  }

  function nodePanel(node, part, go) {
    const names = node.operands.map((operand) => (typeof operand === "string" ? operand : `%${operand.name}`));
    let next = 0;
    const call = `%${node.name} = ${node.op}${node.call.replace(/\{\}/g, () => names[next++])}`;
    return [heading(`${node.op}`, `%${node.name}`), el("pre", { class: "call" }, call), facts(nodeFacts(node)),
      links("Operands", [...new Set(node.operands)], part, go),
      links("Users", node.users, part, go, node.leaves ? "It leaves this graph." : "Nobody reads it.")];
  }

  function inputPanel(box, part, go) {
    const users = part.nodes().filter((node) => node.operands.includes(box.name));
    return [heading("Input", box.name), facts([["type", placed(box.input.type)], ["bytes per rank", bytes(box.input.bytes)]]),
      links("Users", users, part, go)];
  }

  function links(title, items, part, go, none = "None.") {
    const one = (item) => {
      if (typeof item === "string") return el("li", { class: "mono" }, item);
      if (item.type === "int") return el("li", { class: "mono" }, `%${item.name} int`);
      return el("li", {}, link(`%${item.name}`, () => go(part, item)), " ", placed(item.type));
    };
    const most = 40;
    const more = items.length > most ? el("li", { class: "soft" }, `and ${items.length - most} more`) : null;
    return section(title, items.length ? el("ul", { class: "links" }, items.slice(0, most).map(one), more) : el("p", { class: "soft" }, none));
  }

  const link = (text, action) => el("button", { type: "button", class: "link mono", onclick: action }, text);

  function legend() {
    const kinds = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "send"];
    return section("How to read it",
      el("ul", { class: "legend" },
        kinds.map((kind) => el("li", {}, chip(kind), ` ${fxpar.words(kind)}`)),
        el("li", {}, placed("64@tp"), " 64 elements, cut over tp"),
        el("li", {}, el("span", { class: "mono soft" }, "4", placed("@tp")), " behind the parameters of a module: 4 of them are cut over tp"),
        el("li", {}, placed("P(tp)"), " a partial sum: the terms lie on the ranks of tp")),
      el("p", { class: "soft" }, "Bytes and times are those of one rank. Times are predicted for the cluster in the head of the page, and nothing overlaps."));
  }

  fxpar.graph.panel = panel;
})();
