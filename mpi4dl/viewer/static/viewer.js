// The viewer: a list of slides, and one of them with its map and annotations over it.
//
// Slides have coordinates of the full level 0 (x, y). A picture begins at its `origin`, where the scanner began.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { all: [], shown: [], colours: [], kinds: [], number: null, facts: null, map: null, polygons: [], classes: [], chosen: null, rankOrder: [], nextRank: 0 };
let viewer = null;

async function get(path) {
  const response = await fetch(path);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error || `the viewer answered ${response.status}`);
  return found;
}

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const digits = (number, most = 3) => (number === null || number === undefined ? "" : Number(number.toPrecision(most)).toString());
const whole = (number) => Math.round(number).toLocaleString("en");

// The list

function matches(slide, text) {
  const about = [slide.name, slide.patient, slide.label, slide.prediction, slide.error, slide.wrong ? "wrong" : ""];
  return text.toLowerCase().split(/\s+/).every((word) => about.some((each) => each.toLowerCase().includes(word)));
}

function ordered(slides) {
  const last = (value, otherwise) => (value === null ? otherwise : value);
  const by = {
    name: () => 0,
    loss: (a, b) => last(b.loss, -1) - last(a.loss, -1),
    sure: (a, b) => last(a.probability, 2) - last(b.probability, 2),
  }[$("order").value];
  return [...slides].sort((a, b) => by(a, b) || a.number - b.number);
}

function entry(slide) {
  const link = element("a");
  link.href = `#${slide.number}`;
  link.dataset.number = slide.number;
  const picture = element("span", "", "picture");
  const image = element("img");
  Object.assign(image, { loading: "lazy", alt: "", width: 72, height: 72, src: `/api/slides/${slide.number}/thumbnail` });
  image.addEventListener("error", () => picture.replaceChildren("no picture"));
  picture.append(image);
  const text = element("span");
  text.append(element("strong", slide.name));
  if (slide.patient && !slide.name.startsWith(slide.patient)) text.append(element("span", slide.patient, "line soft"));
  if (slide.label || slide.prediction) text.append(verdict(slide));
  const numbers = [];
  if (slide.probability !== null) numbers.push(`probability ${slide.probability.toFixed(3)}`);
  if (slide.loss !== null) numbers.push(`loss ${slide.loss.toFixed(3)}`);
  if (numbers.length) text.append(element("span", numbers.join(" · "), "line soft"));
  if (slide.error) text.append(element("span", slide.error, "line error"));
  link.append(picture, text);
  return link;
}

function verdict(slide) {
  const line = element("span", "", "line");
  if (slide.label) line.append(slide.label, " ");
  if (slide.prediction) line.append(element("span", slide.label ? `as ${slide.prediction}` : slide.prediction, slide.wrong ? "wrong" : slide.label ? "soft" : ""));
  return line;
}

function list() {
  state.shown = ordered(state.all.filter((slide) => matches(slide, $("filter").value)));
  $("list").replaceChildren(...state.shown.map(entry));
  const wrong = state.shown.filter((slide) => slide.wrong).length;
  const failed = state.shown.filter((slide) => slide.error).length;
  const of = state.shown.length < state.all.length ? ` of ${state.all.length}` : "";
  const parts = [`${state.shown.length}${of} ${state.all.length === 1 ? "slide" : "slides"}`];
  if (state.all.some((slide) => slide.wrong !== null)) parts.push(`${wrong} wrong`);
  if (failed) parts.push(`${failed} with errors`);
  $("count").textContent = parts.join(" · ");
  mark();
}

function mark() {
  for (const link of $("list").children) {
    const here = Number(link.dataset.number) === state.number;
    link.toggleAttribute("aria-current", here);
    if (here) {
      link.setAttribute("aria-current", "true");
      link.scrollIntoView({ block: "nearest" });
    }
  }
  const place = state.shown.findIndex((slide) => slide.number === state.number);
  $("previous").disabled = place <= 0;
  $("next").disabled = place < 0 || place + 1 >= state.shown.length;
}

function step(by) {
  const place = state.shown.findIndex((slide) => slide.number === state.number);
  const found = state.shown[place + by];
  if (place >= 0 && found) location.hash = found.number;
}

// One slide

async function open() {
  const number = location.hash.length > 1 ? Number(location.hash.slice(1)) : null;
  const slide = state.all[number];
  document.body.classList.toggle("open", Boolean(slide) && number !== null);
  close();
  state.number = slide && number !== null ? number : null;
  mark();
  if (state.number === null) return;
  $("name").textContent = slide.name;
  $("verdict").replaceChildren(...(slide.label || slide.prediction ? [verdict(slide)] : []));
  $("facts").textContent = slide.patient;
  say("opening the slide …", true);
  try {
    const facts = await get(`/api/slides/${number}`);
    if (state.number !== number) return;
    state.facts = facts;
    describe(slide, facts);
    show(number, facts);
    if (slide.made !== null) over(number, slide.made, await get(`/api/slides/${slide.made}`));
  } catch (error) {
    if (state.number === number) say(slide.error || error.message);
    return;
  }
  for (const each of document.querySelectorAll(".of-map")) each.hidden = !slide.map;
  for (const each of document.querySelectorAll(".of-annotations")) each.hidden = !slide.annotations;
  for (const each of document.querySelectorAll(".of-classes")) each.hidden = !slide.classes;
  for (const each of document.querySelectorAll(".of-made")) each.hidden = slide.made === null;
  for (const each of document.querySelectorAll(".of-drawn")) each.hidden = !slide.map && !slide.classes;
  $("controls").hidden = !slide.map && !slide.annotations && !slide.classes && slide.made === null;
  const parts = [
    slide.map && get(`/api/slides/${number}/map`).then((found) => state.number === number && mapped(found)),
    slide.annotations && get(`/api/slides/${number}/annotations`).then((found) => state.number === number && annotated(found)),
    slide.classes && get(`/api/slides/${number}/classes`).then((found) => state.number === number && classified(found)),
  ];
  for (const result of await Promise.allSettled(parts)) {
    if (result.status === "rejected" && state.number === number) note([["", result.reason.message]], true);
  }
}

function close() {
  if (viewer) viewer.destroy();
  viewer = null;
  Object.assign(state, { facts: null, map: null, polygons: [], classes: [], chosen: null, rankOrder: [], nextRank: 0 });
  for (const id of ["scale", "info", "message", "controls"]) $(id).hidden = true;
  draw();
}

function say(text, loading = false) {
  $("message").textContent = text;
  $("message").classList.toggle("loading", loading);
  $("message").hidden = !text;
}

function describe(slide, facts) {
  const parts = [`${whole(facts.width)} × ${whole(facts.height)} px`];
  if (facts.mpp !== null) parts.push(`${digits(facts.mpp)} µm per pixel`);
  if (facts.magnification !== null) parts.push(`${digits(facts.magnification)}×`);
  $("facts").textContent = [slide.patient, ...parts].filter(Boolean).join(" · ");
}

const source = (number, facts) => ({
  width: facts.width,
  height: facts.height,
  tileSize: facts.tile,
  tileOverlap: 0,
  minLevel: 0,
  maxLevel: facts.levels - 1,
  getTileUrl: (level, col, row) => `/api/slides/${number}/tiles/${level}/${col}_${row}.jpg`,
});

// The picture that a model made lies over its input, from a place on that the reader moves

function over(number, made, facts) {
  if (state.number === number) viewer.addTiledImage({ tileSource: source(made, facts), success: divide });
}

function divide() {
  const made = viewer && viewer.world.getItemAt(1);
  if (!made) return;
  const { x: width, y: height } = made.getContentSize();
  const from = width * Number($("split").value) / 100;
  made.setClip(new OpenSeadragon.Rect(from, 0, width - from, height));
}

function show(number, facts) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  viewer = OpenSeadragon({
    element: $("zoom"),
    drawer: "canvas",
    showNavigationControl: false,
    showNavigator: true,
    navigatorPosition: "TOP_RIGHT",
    navigatorSizeRatio: 0.16,
    navigatorAutoFade: false,
    animationTime: still ? 0 : 0.5,
    maxZoomPixelRatio: 8,
    visibilityRatio: 0.4,
    gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
    gestureSettingsTouch: { clickToZoom: false, dblClickToZoom: true, pinchRotate: false },
    gestureSettingsPen: { clickToZoom: false, dblClickToZoom: true },
    tileSources: source(number, facts),
  });
  viewer.canvas.setAttribute("role", "application");
  viewer.canvas.setAttribute("aria-label", "The slide: arrow keys move it, plus and minus zoom, 0 shows the whole");
  viewer.addHandler("tile-drawn", () => say(""));
  viewer.addHandler("tile-load-failed", (event) => failed(number, event));
  viewer.addHandler("update-viewport", draw);
  viewer.addHandler("animation", draw);
  viewer.addHandler("resize", () => requestAnimationFrame(draw));
  viewer.addHandler("open", draw);
  viewer.addHandler("canvas-click", (event) => event.quick && choose(event.position));
}

async function failed(number, event) {
  try {
    await get(event.tile.getUrl());
  } catch (error) {
    if (state.number === number) say(error.message);
  }
}

// Pixels of the page of a place of level 0, as numbers to multiply and to add

function transform() {
  const image = viewer && viewer.world.getItemAt(0);
  if (!image || !state.facts) return null;
  const at = (x) => viewer.viewport.pixelFromPoint(image.imageToViewportCoordinates(x, 0, true), true);
  const [left, right] = [at(0), at(state.facts.width)];
  const scale = (right.x - left.x) / state.facts.width;
  return { scale, x: left.x - state.facts.origin[0] * scale, y: left.y - state.facts.origin[1] * scale };
}

// The map

function mapped(map) {
  state.map = map;
  map.width = Math.max(...[0].concat(...chunks(map.cols, Math.max))) + 1;
  map.height = Math.max(...[0].concat(...chunks(map.rows, Math.max))) + 1;
  map.at = new Map(map.rows.map((row, index) => [row * map.width + map.cols[index], index]));
  map.sorted = [...map.values].sort((a, b) => a - b);
  state.rankOrder = map.values.map((_, index) => index).sort((a, b) => map.values[b] - map.values[a]);
  $("map-title").textContent = map.title;
  paint();
}

function chunks(values, reduce) {  // as a call with a million arguments fails
  const found = [];
  for (let start = 0; start < values.length; start += 10000) found.push(reduce(...values.slice(start, start + 10000)));
  return found;
}

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (state.colours.length - 1);
  const first = Math.min(Math.floor(at), state.colours.length - 2);
  return state.colours[first].map((low, i) => Math.round(255 * (low + (state.colours[first + 1][i] - low) * (at - first))));
}

function share(index) {
  const { values, ranks, sorted } = state.map;
  if ($("scaling").value === "rank") return ranks[index];
  const [low, high] = [sorted[0], sorted[sorted.length - 1]];
  return high > low ? (values[index] - low) / (high - low) : 1;
}

function paint() {  // the map with a pixel for each patch, which `draw` enlarges
  const map = state.map;
  if (!map) return;
  const least = Number($("least").value) / 100;
  map.picture = document.createElement("canvas");
  Object.assign(map.picture, { width: map.width, height: map.height });
  const context = map.picture.getContext("2d");
  const pixels = context.createImageData(map.width, map.height);
  for (let index = 0; index < map.values.length; index++) {
    if (map.ranks[index] <= least && least > 0) continue;
    const place = 4 * (map.rows[index] * map.width + map.cols[index]);
    pixels.data.set([...colour(share(index)), 255], place);
  }
  context.putImageData(pixels, 0, 0);
  legend();
  draw();
}

function legend() {
  const ramp = $("ramp"), context = ramp.getContext("2d"), sorted = state.map.sorted;
  for (let x = 0; x < ramp.width; x++) {
    context.fillStyle = `rgb(${colour(x / (ramp.width - 1))})`;
    context.fillRect(x, 0, 1, ramp.height);
  }
  const last = sorted.length - 1, ends = [sorted[0], sorted[last]];
  const middle = $("scaling").value === "rank" ? sorted[Math.round(last / 2)] : (ends[0] + ends[1]) / 2;
  $("ticks").replaceChildren(...[ends[0], middle, ends[1]].map((value) => element("span", digits(value))));
  $("least-value").textContent = `rank ${$("least").value} %`;
}

function draw() {
  const canvas = $("overlay"), ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const to = transform();
  if (!to) return;
  if ($("show-classes").checked) drawClasses(context, to, width, height);
  if (state.map) drawMap(context, to, width, height);
  if ($("show-annotations").checked) drawPolygons(context, to, width, height);
  if (state.chosen !== null) {
    const [x, y, side] = box(state.chosen, to);
    const line = Math.min(Math.max(side / 12, 1), 3);
    for (const [wide, style] of [[line + 2, "#000"], [line, "#fff"]]) {
      context.lineWidth = wide;
      context.strokeStyle = style;
      context.strokeRect(x, y, side, side);
    }
  }
  scaleBar(to.scale);
}

function box(index, to) {
  const { origin, side, rows, cols } = state.map;
  return [to.x + (origin[0] + cols[index] * side) * to.scale, to.y + (origin[1] + rows[index] * side) * to.scale, side * to.scale];
}

function drawMap(context, to, width, height) {
  const map = state.map, side = map.side * to.scale;
  const [left, top] = [to.x + map.origin[0] * to.scale, to.y + map.origin[1] * to.scale];
  const clamp = (value, most) => Math.min(Math.max(value, 0), most);
  const cols = [clamp(Math.floor(-left / side), map.width), clamp(Math.ceil((width - left) / side), map.width)];
  const rows = [clamp(Math.floor(-top / side), map.height), clamp(Math.ceil((height - top) / side), map.height)];
  const [across, down] = [cols[1] - cols[0], rows[1] - rows[0]];
  if (across <= 0 || down <= 0) return;
  if ($("show-map").checked) {
    context.imageSmoothingEnabled = false;
    context.globalAlpha = Number($("opacity").value) / 100;
    context.drawImage(map.picture, cols[0], rows[0], across, down, left + cols[0] * side, top + rows[0] * side, across * side, down * side);
    context.globalAlpha = 1;
  }
  if (!$("show-outlines").checked || side < 4) return;
  context.lineWidth = 1;
  context.strokeStyle = "#0b3c8c";
  context.beginPath();
  for (let row = rows[0]; row < rows[1]; row++) {
    for (let col = cols[0]; col < cols[1]; col++) {
      if (map.at.has(row * map.width + col)) context.rect(left + col * side, top + row * side, side, side);
    }
  }
  context.stroke();
}

// Annotations, and regions of predicted classes

function placed(found) {  // with the ends of each region, so that those out of sight are not drawn
  const ends = (values) => [Math.min(...chunks(values, Math.min)), Math.max(...chunks(values, Math.max))];
  return found.regions.map(({ name, rings }) => {
    const points = rings[0];
    return { name, rings, x: ends(points.map((point) => point[0])), y: ends(points.map((point) => point[1])) };
  });
}

function annotated(found) {
  state.polygons = placed(found);
  draw();
}

function classified(found) {
  state.classes = placed(found);
  $("kinds").replaceChildren(...found.names.map((name, number) => {
    const entry = element("span", name || "no class");
    const chip = element("span", "", "chip");
    chip.style.background = kind(number);
    entry.prepend(chip);
    return entry;
  }));
  draw();
}

const kind = (number) => state.kinds[number % state.kinds.length];

function trace(context, regions, to, width, height) {
  context.beginPath();
  for (const { rings, x, y } of regions) {
    if (to.x + x[1] * to.scale < 0 || to.x + x[0] * to.scale > width || to.y + y[1] * to.scale < 0 || to.y + y[0] * to.scale > height) continue;
    for (const ring of rings) {
      ring.forEach((point, i) => context[i ? "lineTo" : "moveTo"](to.x + point[0] * to.scale, to.y + point[1] * to.scale));
      context.closePath();
    }
  }
}

function drawClasses(context, to, width, height) {
  const numbers = new Set(state.classes.map((region) => region.name));
  for (const number of numbers) {
    trace(context, state.classes.filter((region) => region.name === number), to, width, height);
    context.globalAlpha = Number($("opacity").value) / 100;
    context.fillStyle = kind(number);
    context.fill("evenodd");
    context.globalAlpha = 1;
  }
}

function drawPolygons(context, to, width, height) {
  trace(context, state.polygons, to, width, height);
  for (const [wide, style] of [[4, "#fff"], [2, "#00814f"]]) {
    context.lineWidth = wide;
    context.strokeStyle = style;
    context.stroke();
  }
}

// Scale bar, magnification and the chosen patch

function scaleBar(scale) {
  const { mpp, magnification } = state.facts;
  const longest = Math.min(160, $("stage").clientWidth / 3);
  const unit = (mpp === null ? 1 : mpp) / scale;  // µm, or pixels of level 0, of a pixel of the page
  const power = 10 ** Math.floor(Math.log10(longest * unit));
  const length = [5, 2, 1].map((each) => each * power).find((each) => each / unit <= longest);
  $("bar").style.width = `${length / unit}px`;
  $("length").textContent = mpp === null ? `${digits(length)} px` : length >= 1000 ? `${digits(length / 1000)} mm` : `${digits(length)} µm`;
  $("power").textContent = magnification === null ? `level 0 at ${digits(100 * scale)} %` : `${digits(magnification * scale)}×`;
  $("scale").hidden = false;
}

function note(rows, wrong = false) {
  const table = element("table");
  for (const [name, value] of rows) {
    const row = table.insertRow();
    if (name) row.insertCell().textContent = name;
    const cell = row.insertCell();
    cell.textContent = value;
    if (wrong) cell.className = "error";
  }
  $("info").replaceChildren(table);
  $("info").hidden = !rows.length;
}

function select(index) {
  const map = state.map;
  state.chosen = index;
  const [x, y] = [map.origin[0] + map.cols[index] * map.side, map.origin[1] + map.rows[index] * map.side];
  const above = map.sorted.length - map.values.filter((value) => value <= map.values[index]).length;
  note([
    [map.title, digits(map.values[index], 5)],
    ["rank", `${above + 1} of ${map.values.length}`],
    ["x, y (level 0)", `${whole(x)}, ${whole(y)}`],
    ["side", `${whole(map.side)} px`],
  ]);
  draw();
}

function choose(position) {
  const to = transform();
  if (!to || !state.map) return;
  const { origin, side, width, height, at } = state.map;
  const col = Math.floor(((position.x - to.x) / to.scale - origin[0]) / side);
  const row = Math.floor(((position.y - to.y) / to.scale - origin[1]) / side);
  const index = col >= 0 && col < width && row >= 0 && row < height ? at.get(row * width + col) : undefined;
  if (index !== undefined) return select(index);
  state.chosen = null;
  note([]);
  draw();
}

function highest() {
  if (!state.map || !viewer) return;
  const index = state.rankOrder[state.nextRank];
  state.nextRank = (state.nextRank + 1) % state.rankOrder.length;
  select(index);
  const { origin, side, rows, cols } = state.map;
  const image = viewer.world.getItemAt(0);
  const around = 4;  // patches on each side
  const corner = (places, axis) => origin[axis] - state.facts.origin[axis] + (places[index] - around) * side;
  const [x, y, length] = [corner(cols, 0), corner(rows, 1), (2 * around + 1) * side];
  viewer.viewport.fitBounds(image.imageToViewportRectangle(x, y, length, length));
}

// What the reader does

function listen() {
  $("filter").addEventListener("input", list);
  $("order").addEventListener("change", list);
  for (const id of ["show-map", "opacity", "show-outlines", "show-classes", "show-annotations"]) $(id).addEventListener("input", draw);
  $("split").addEventListener("input", divide);
  for (const id of ["least", "scaling"]) $(id).addEventListener("input", paint);
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  $("in").addEventListener("click", () => viewer && viewer.viewport.zoomBy(1.6).applyConstraints());
  $("out").addEventListener("click", () => viewer && viewer.viewport.zoomBy(1 / 1.6).applyConstraints());
  $("home").addEventListener("click", () => viewer && viewer.viewport.goHome());
  $("highest").addEventListener("click", highest);
  addEventListener("hashchange", open);
  addEventListener("resize", () => requestAnimationFrame(draw));
  addEventListener("keydown", (event) => {
    const typing = event.target.matches("input[type=search], select");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing) return;
    const act = { "/": () => $("filter").focus(), n: () => step(1), p: () => step(-1), h: highest }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

async function begin() {
  listen();
  try {
    const found = await get("/api/slides");
    state.all = found.slides.map((slide, number) => ({ ...slide, number }));
    state.colours = found.colours;
    state.kinds = found.kinds;
    $("title").textContent = found.title;
    document.title = `${found.title} · mpi4dl`;
    $("remarks").replaceChildren(...found.remarks.map((remark) => element("li", remark)));
    $("remarks").hidden = !found.remarks.length;
    if (state.all.some((slide) => slide.loss !== null)) $("order").value = "loss";
    list();
    await open();
  } catch (error) {
    $("count").textContent = error.message;
  }
}

begin();
