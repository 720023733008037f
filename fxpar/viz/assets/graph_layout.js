"use strict";
// Where the boxes of a drawing stand and how its edges run, from the sizes of the boxes. Nothing of the page is touched.
(() => {
  const GAP_X = 20;
  const BEND = 12; // room that a bend of an edge takes in its row
  const NARROW = 18; // between rows
  const WIDE = 34; // between rows where edges have labels
  const SWEEPS = 8;

  // layout(drawing, sizes, labels): `sizes` are [width, height] of the items, `labels` texts of the edges or "".
  // Gives {width, height, at: [[x, y]], edges: [{d, x, y}]}, with x, y the place of each edge's label.
  function layout(drawing, sizes, labels) {
    const count = drawing.items.length;
    const width = (id) => (id < count ? sizes[id][0] : BEND);
    const rowOf = new Map(drawing.layers.flatMap((row, r) => row.map((id) => [id, r])));
    const centres = across(drawing, width, count);
    const [tops, heights, height] = down(drawing, sizes, labels, rowOf, count);
    const at = sizes.map((size, id) => [centres.get(id) - size[0] / 2, tops[rowOf.get(id)]]);
    const left = Math.min(0, ...at.map(([x]) => x), ...[...centres].map(([id, x]) => x - width(id) / 2));
    for (const place of at) place[0] -= left;
    for (const [id, x] of centres) centres.set(id, x - left);
    const right = Math.max(0, ...[...centres].map(([id, x]) => x + width(id) / 2));
    const ports = entries(drawing, centres, sizes, count);
    const edges = drawing.edges.map((edge, e) => route(edge, e, { centres, ports, at, sizes, tops, heights, rowOf, right }));
    const back = drawing.edges.some((edge) => edge[5]);
    return { width: right + (back ? 24 : 0), height, at, edges };
  }

  // Centres of items and bends: each row as close as its order allows to the neighbours above and below.
  function across(drawing, width, count) {
    const near = new Map(drawing.layers.flat().map((id) => [id, { above: new Set(), below: new Set() }]));
    for (const [path, , , , , back] of drawing.edges) {
      for (let i = 1; !back && i < path.length; i += 1) {
        near.get(path[i - 1]).below.add(path[i]);
        near.get(path[i]).above.add(path[i - 1]);
      }
    }
    const centres = new Map();
    for (const row of drawing.layers) {
      let x = -row.reduce((sum, id) => sum + width(id) + GAP_X, -GAP_X) / 2;
      for (const id of row) {
        centres.set(id, x + width(id) / 2);
        x += width(id) + GAP_X;
      }
    }
    for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
      const side = sweep % 2 ? "below" : "above";
      const rows = sweep % 2 ? [...drawing.layers].reverse() : drawing.layers;
      for (const row of rows) {
        const wanted = row.map((id) => {
          const others = [...near.get(id)[side]];
          return others.length ? others.reduce((sum, other) => sum + centres.get(other), 0) / others.length : centres.get(id);
        });
        const weights = row.map((id) => (near.get(id)[side].size ? (id < count ? 4 : 1) : 0.2));
        const gaps = row.slice(1).map((id, i) => (width(row[i]) + width(id)) / 2 + GAP_X);
        spread(wanted, weights, gaps).forEach((x, i) => centres.set(row[i], x));
      }
    }
    return centres;
  }

  // The places closest to those wanted (least squares) that keep the gaps: pool adjacent violators.
  function spread(wanted, weights, gaps) {
    const offsets = [0];
    for (const gap of gaps) offsets.push(offsets.at(-1) + gap);
    const pools = [];
    wanted.forEach((x, i) => {
      let pool = { sum: (x - offsets[i]) * weights[i], weight: weights[i], size: 1 };
      while (pools.length && pools.at(-1).sum / pools.at(-1).weight > pool.sum / pool.weight) {
        const last = pools.pop();
        pool = { sum: last.sum + pool.sum, weight: last.weight + pool.weight, size: last.size + pool.size };
      }
      pools.push(pool);
    });
    return pools.flatMap((pool) => Array(pool.size).fill(pool.sum / pool.weight)).map((x, i) => x + offsets[i]);
  }

  function down(drawing, sizes, labels, rowOf, count) {
    const heights = drawing.layers.map((row) => Math.max(0, ...row.filter((id) => id < count).map((id) => sizes[id][1])));
    const wide = new Set(drawing.edges.flatMap((edge, e) => (labels[e] ? [rowOf.get(edge[0].at(-1))] : [])));
    const tops = [];
    let y = 0;
    heights.forEach((height, row) => {
      if (row) y += wide.has(row) ? WIDE : NARROW;
      tops.push(y);
      y += height;
    });
    return [tops, heights, y];
  }

  // Where on its target's upper side each edge ends: side by side, in the order in which they come.
  function entries(drawing, centres, sizes, count) {
    const arriving = new Map();
    drawing.edges.forEach(([path, , , , , back], e) => {
      if (back) return;
      const target = path.at(-1);
      if (!arriving.has(target)) arriving.set(target, []);
      arriving.get(target).push([centres.get(path.at(-2)), e]);
    });
    const ports = new Map();
    for (const [target, edges] of arriving) {
      edges.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      const step = target < count ? Math.min(26, (sizes[target][0] - 16) / edges.length) : 0;
      edges.forEach(([, e], i) => ports.set(e, centres.get(target) + (i - (edges.length - 1) / 2) * step));
    }
    return ports;
  }

  function route([path, , , , , back], e, found) {
    const { centres, ports, at, sizes, tops, heights, rowOf } = found;
    const [source, target] = [path[0], path.at(-1)];
    let [x, y] = [centres.get(source), at[source][1] + sizes[source][1]];
    if (back) return returning(source, target, found);
    let d = `M${round(x)} ${round(y)}`;
    const curve = (toX, toY) => {
      const half = (toY - y) / 2;
      d += x === toX ? `V${round(toY)}` : `C${round(x)} ${round(y + half)} ${round(toX)} ${round(toY - half)} ${round(toX)} ${round(toY)}`;
      [x, y] = [toX, toY];
    };
    for (const bend of path.slice(1, -1)) {
      const row = rowOf.get(bend);
      curve(centres.get(bend), tops[row]);
      y = tops[row] + heights[row];
      d += `V${round(y)}`;
    }
    curve(ports.get(e), at[target][1]);
    return { d: `${d}${arrow}`, x: x + 5, y: y - 9 };
  }

  // An edge against the order of the rows goes around on the right side.
  function returning(source, target, { at, sizes, right }) {
    const [x, y] = [at[source][0] + sizes[source][0], at[source][1] + sizes[source][1] / 2];
    const [toX, toY] = [at[target][0] + sizes[target][0], at[target][1] + sizes[target][1] / 2];
    const side = right + 14;
    const d = `M${round(x)} ${round(y)}H${round(side)}V${round(toY)}H${round(toX)}m6 -3l-6 3l6 3`;
    return { d, x: side - 4, y: (y + toY) / 2 };
  }

  const round = (x) => Math.round(x * 10) / 10;
  const arrow = "m-3.5 -5.5l3.5 5.5l3.5 -5.5";

  fxpar.graph.layout = layout;
})();
