"use strict";
// Reads the section of the graph tab: strings, rows and drawings by number become nodes and boxes.
//
// A node: {index, name, op, call, type, local, axes, bytes, flops, ms, source, why, wire, operands, users, fqn, results}.
// `operands` are nodes, or names of inputs. A box is what is drawn: {kind, key, name, fqn, base, drawing, sums, node,
// parent}; `kind` is module, run, node, input or output, and boxes of one key are the same thing under each strategy.
fxpar.graph = (() => {
  const known = new Map(); // view -> what was read of it

  function strategyData(section, view) {
    if (!known.has(view)) known.set(view, new Strategy(section.tables, view));
    return known.get(view);
  }

  class Strategy {
    constructor(tables, view) {
      this.tables = tables;
      this.view = view;
      this.parts = view.parts.map((part) => new Part(this, part));
      this.decoded = new Map();
      this.params = view.params.map(([fqn, type, local, bytes, stage]) => ({ fqn, type, local, bytes, stage }));
    }

    graph(number) {
      if (!this.decoded.has(number)) this.decoded.set(number, decodeGraph(this.tables, this.view.graphs[number]));
      return this.decoded.get(number);
    }

    // Parameters of a module and of all below it, on a pipeline stage.
    paramsOf(fqn, stage) {
      return this.params.filter((param) => param.stage === stage && (!fqn || param.fqn.startsWith(`${fqn}.`)));
    }
  }

  function decodeGraph(tables, graph) {
    const fqns = graph.fqns.flatMap(([text, length]) => Array(length).fill(tables.strings[text]));
    const prefix = graph.name === "body" ? "" : `${graph.name}.`;
    const counts = new Map(); // names count up per op, as in the printed form
    const nodes = graph.rows.map((number, index) => {
      const [op, call, type, local, axes, bytes, flops, ms, source, why, wire] = tables.rows[number];
      const text = tables.strings[op];
      counts.set(text, (counts.get(text) ?? -1) + 1);
      return {
        index, name: `${prefix}${text}_${counts.get(text)}`, op: text, call: tables.strings[call], type: tables.strings[type],
        local: tables.strings[local], axes: tables.strings[axes], bytes, flops, ms, source: tables.strings[source],
        why: tables.strings[why], wire: wire && readWire(wire), fqn: fqns[index], operands: [], users: [],
      };
    });
    nodes.forEach((node, index) => {
      node.operands = tables.operands[graph.operands[index]].map((operand) => {
        if (typeof operand === "number") return nodes[index - operand];
        return operand.startsWith(".") ? node.fqn + operand : operand;
      });
      for (const operand of new Set(node.operands)) if (typeof operand !== "string") operand.users.push(node);
    });
    for (const index of graph.results) nodes[index].leaves = true;
    const inputs = new Map(graph.inputs.map(([name, type, bytes, kind]) => [name, { name, type, bytes, kind }]));
    return { nodes, inputs };
  }

  const readWire = ([kind, axis, bytes, ms, fused]) => ({ kind, axis, bytes, ms, fused });

  class Part {
    constructor(strategy, encoded) {
      Object.assign(this, { strategy, id: encoded.id, title: encoded.title, about: encoded.about, stage: encoded.stage });
      this.encoded = encoded;
      this.boxes = new Map(); // key -> box, of all that was drawn or looked up
    }

    get graph() {
      return this.strategy.graph(this.encoded.graph);
    }

    // Where it is, in words.
    get place() {
      return this.stage === null ? this.title : `${this.title} of stage ${this.stage}`;
    }

    get root() {
      this.rootBox ??= this.module(0, null, "");
      return this.rootBox;
    }

    add(box) {
      this.boxes.set(box.key, box);
      return box;
    }

    module(number, parent, fqn) {
      const [name, base, drawing, sums] = this.encoded.modules[number];
      return this.add({ kind: "module", key: `m:${fqn}`, name, fqn, base, number, parent, part: this,
        drawing: this.strategy.tables.drawings[drawing], sums: this.strategy.tables.sums[sums] });
    }

    // What stands inside of a box, in program order.
    children(box) {
      box.inside ??= (box.drawing?.items ?? []).map((item) => this.child(box, item));
      return box.inside;
    }

    child(box, [kind, ...rest]) {
      if (kind === "m") {
        const number = box.number + rest[0];
        const name = this.encoded.modules[number][0];
        return this.module(number, box, box.fqn ? `${box.fqn}.${name}` : name);
      }
      if (kind === "r") {
        const [title, drawing, sums, first] = rest;
        const { tables } = this.strategy;
        return this.add({ kind: "run", key: `r:${box.fqn}:${title}:${first}`, name: title, fqn: box.fqn, base: box.base + first,
          parent: box, part: this, drawing: tables.drawings[drawing], sums: tables.sums[sums] });
      }
      if (kind === "i") {
        return this.add({ kind: "input", key: `i:${rest[0]}`, name: rest[0], fqn: "", parent: box, part: this,
          input: this.graph.inputs.get(rest[0]) });
      }
      const node = this.graph.nodes[box.base + rest.at(-1)];
      if (kind === "o") {
        return this.add({ kind: "output", key: `o:${rest[0]}`, name: rest[0], fqn: "", parent: box, part: this, node });
      }
      return this.add({ kind: "node", key: `n:${node.index}`, name: node.op, fqn: node.fqn, parent: box, part: this, node });
    }

    // All modules by FQN, and the box of a node; both without drawing anything.
    modules() {
      const found = [];
      const walk = (box) => {
        if (box.fqn) found.push(box);
        for (const child of this.children(box)) if (child.kind === "module") walk(child);
      };
      walk(this.root);
      return found;
    }

    boxOf(node) {
      const inside = (box) => {
        for (const child of this.children(box)) {
          if (child.kind === "node" && child.node === node) return child;
          const below = child.kind === "module" && (child.fqn === node.fqn || node.fqn.startsWith(`${child.fqn}.`));
          if (below || (child.kind === "run" && child.fqn === node.fqn)) {
            const found = inside(child);
            if (found) return found;
          }
        }
        return null;
      };
      return inside(this.root);
    }

    // The nodes that this part shows: a body has the forward's and the backward's.
    nodes() {
      if (!this.shown) {
        const held = new Set();
        const walk = (box) => {
          for (const child of this.children(box)) {
            if (child.kind === "node") held.add(child.node);
            else if (child.drawing) walk(child);
          }
        };
        walk(this.root);
        this.shown = [...held];
      }
      return this.shown;
    }
  }

  // Modules and nodes that match a glob over FQNs, ops and FQN.op; without * and ? those that have the text in their FQN,
  // op or name, or end with it.
  function search(part, text) {
    const glob = /[*?]/.test(text);
    const escaped = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
    const pattern = new RegExp(glob ? `^${escaped}$` : escaped, "i");
    const end = new RegExp(`${escaped}$`, "i");
    const place = (node) => `${node.fqn}.${node.op}`;
    const matches = (node) => pattern.test(node.op) || pattern.test(node.name) || (glob ? pattern : end).test(place(node));
    return [...part.modules().filter((box) => pattern.test(box.fqn)).map((box) => ({ box })),
      ...part.nodes().filter(matches).map((node) => ({ node }))];
  }

  return { strategyData, search };
})();
