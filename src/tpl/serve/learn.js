/* A zip of the chosen images, not compressed (images hardly would be) */
const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit += 1) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});
function checksum(data) {
  let crc = 0xffffffff;
  for (const byte of data) crc = CRC[(crc ^ byte) & 255] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}
function record(fields) {  // pairs of [bytes, value], little-endian
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [size]) => sum + size, 0)));
  let at = 0;
  for (const [size, value] of fields) { size === 2 ? view.setUint16(at, value, true) : view.setUint32(at, value, true); at += size; }
  return view.buffer;
}
async function zip(entries) {
  const parts = [], directory = [];
  let offset = 0, listed = 0;
  for (const [path, file] of entries) {
    const name = new TextEncoder().encode(path), crc = checksum(new Uint8Array(await file.arrayBuffer()));
    const common = [[2, 20], [2, 0x800], [2, 0], [2, 0], [2, 0x21], [4, crc], [4, file.size], [4, file.size], [2, name.length], [2, 0]];
    parts.push(record([[4, 0x04034b50], ...common]), name, file);
    directory.push(record([[4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]]), name);
    offset += 30 + name.length + file.size;
    listed += 46 + name.length;
  }
  const n = entries.length;
  const end = record([[4, 0x06054b50], [2, 0], [2, 0], [2, n], [2, n], [4, listed], [4, offset], [2, 0]]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}

/* Adding classes */
let rows = [];
function addRow(name = "", files = []) {
  const number = addRow.count = (addRow.count || 0) + 1;
  const row = { files: [...files] };
  row.name = make("input", { type: "text", maxLength: 80, value: name, placeholder: "heron", id: `name-${number}` });
  row.input = make("input", { type: "file", class: "hidden", accept: "image/*,.tif,.tiff", multiple: true, id: `files-${number}` });
  row.chosen = make("span", { class: "small quiet grow", role: "status" });
  const remove = make("button", { type: "button", class: "link small remove", textContent: "Remove" });
  row.element = make("fieldset", {},
    make("legend", { class: "hidden", textContent: "A new class" }),
    make("label", { class: "small quiet", htmlFor: row.name.id, textContent: "Name" }), row.name,
    make("div", { class: "row" }, row.input, make("label", { class: "button", htmlFor: row.input.id, textContent: "Choose images" }),
      row.chosen, remove));
  const count = row.count = () => {
    const more = known.has(row.name.value.trim()) ? ", more of a known class" : "";
    row.chosen.textContent = row.files.length ? plural(row.files.length, "image") + more : "none yet";
  };
  row.name.addEventListener("input", count);
  row.input.addEventListener("change", () => { row.files = [...row.input.files]; count(); });
  remove.addEventListener("click", () => {
    rows = rows.filter((other) => other !== row);
    row.element.remove();
    if (!rows.length) addRow();
    $("more").focus();
  });
  count();
  rows.push(row);
  $("rows").append(row.element);
  return row;
}
$("more").addEventListener("click", () => { addRow().name.focus(); });
$("pick").addEventListener("click", () => { $("folder").click(); });
$("folder").addEventListener("change", () => {
  const classes = new Map();
  for (const file of $("folder").files) {
    const parts = file.webkitRelativePath.split("/");
    const name = parts[parts.length - 2];
    if (!file.type.startsWith("image/") || file.name.startsWith(".")) continue;
    classes.set(name, [...(classes.get(name) || []), file]);
  }
  rows.filter((row) => !row.name.value && !row.files.length).forEach((row) => row.element.remove());
  rows = rows.filter((row) => row.element.isConnected);
  classes.forEach((files, name) => addRow(name, files));
  if (!rows.length) addRow();
  problem(classes.size ? "" : "There are no images in that folder.");
  $("folder").value = "";
});
function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}
function badName(name) {
  if (!name) return "Give every class a name.";
  return /[\/\\:]|^\.|^__MACOSX$/.test(name) ? `“${name}” cannot be a name: it has a slash or colon in it, or begins with a dot.` : "";
}
function mistake() {
  const names = rows.map((row) => row.name.value.trim());
  for (const [i, name] of names.entries()) {
    const wrong = badName(name)
      || (names.indexOf(name) !== i ? `“${name}” appears twice.` : "")
      || (!rows[i].files.length ? `Choose images of “${name}”.` : "");
    if (wrong) { rows[i].name.focus(); return wrong; }
  }
  return "";
}
/* Pairs of a class and an image as files of class folders: [path in the zip, image]. */
function inFolders(pairs) {
  return pairs.map(([name, file], i) => {
    const suffix = file.name.includes(".") ? file.name.slice(file.name.lastIndexOf(".")) : ".png";
    return [`${name}/${String(i + 1).padStart(5, "0")}${suffix.toLowerCase()}`, file];
  });
}
function chosenPairs() {
  return rows.flatMap((row) => row.files.map((file) => [row.name.value.trim(), file]));
}
/* Send pairs of a class and an image to be learned; images of known classes are added to them. */
async function teach(pairs, title) {
  const form = new FormData(), name = [...new Set(pairs.map(([label]) => label))].filter((label) => !known.has(label)).join(", ");
  if (name) form.append("name", name.length > 60 ? `${name.slice(0, 58)} …` : name);
  form.append("update", "true");
  form.append("file", await zip(inFolders(pairs)), `${title}.zip`);
  return call("tasks", { method: "POST", body: form });
}
async function busy(button, text, work) {
  const usual = button.textContent;
  button.disabled = true;
  button.textContent = text;
  try { return await work(); } finally {
    button.disabled = false;
    button.textContent = usual;
  }
}
$("learn").addEventListener("submit", async (event) => {
  event.preventDefault();
  problem(mistake());
  if (!$("problem").hidden) return;
  try {
    const job = await busy($("send"), "Sending …", () => teach(chosenPairs(), "images chosen on the page"));
    rows.forEach((row) => row.element.remove());
    rows = [];
    addRow();
    $("findings").hidden = true;
    $("add").open = false;
    follow(job);
  } catch (error) {
    problem(error.message);
  }
});

/* Progress of learning */
const followed = new Set();
async function follow(job) {
  if (followed.has(job.id)) return;
  followed.add(job.id);
  const fill = make("div", { class: "fill" }), state = make("span", { class: "small state" });
  const track = make("div", { class: "track", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "Progress" }, fill);
  const card = make("div", { class: "job" }, make("b", { textContent: job.name || job.classes.join(", ") }), track, state);
  $("jobs").append(card);
  for (;;) {
    const share = Math.round(100 * job.progress);
    fill.style.width = `${share}%`;
    track.setAttribute("aria-valuenow", share);
    const notes = job.warnings.length ? `. ${job.warnings.join(" ")}` : "";
    const left = job.seconds_left === null || job.seconds_left === undefined ? "" : `, about ${duration(job.seconds_left)} left`;
    state.textContent = { queued: "Waiting for its turn", learning: `Learning: ${job.message}${left}`, done: `Learned${notes}`, failed: job.message }[job.state];
    card.className = `job ${job.state}`;
    if (job.state === "done" || job.state === "failed") break;
    await new Promise((resolve) => { setTimeout(resolve, POLL); });
    try {
      job = await call(`tasks/${job.id}`);
    } catch (error) {
      job = { ...job, state: "failed", message: error.message };
    }
  }
  track.hidden = true;
  if (job.state !== "done") return;
  if (job.outcome) card.append(make("ul", { class: "small" }, ...effects(job.outcome).map((text) => make("li", { textContent: text }))));
  await showModel();
}
/* What learning did: how well the new classes are recognised, and what became of the older ones. */
function effects(outcome) {
  const lines = [], { measured, old_classes: old } = outcome;
  const more = Object.entries(outcome.updated).map(([name, images]) => `${plural(images, "more image")} of ${name}`);
  if (more.length) lines.push(`Added ${more.join(", ")}.`);
  if (measured) {
    const which = measured.held_out ? plural(measured.images, "held-out image") : `${plural(measured.images, "image")}, each left out in turn,`;
    lines.push(`New classes: ${measured.right} of ${which} right (${between(measured.interval)}).`);
  }
  if (old) {
    lines.push(`Older classes, each stored image left out in turn: ${old.before.right} of ${old.before.images} right before, ${old.after.right} of ${old.after.images} now (${between(old.after.interval)}).`);
  }
  const confused = [...outcome.confused, ...(old ? old.confused : [])];
  const pairs = new Map(confused.map((pair) => [`${pair.true}\n${pair.predicted}`, pair]));
  [...pairs.values()].slice(0, 5).forEach((pair) => lines.push(`${pair.true} is taken for ${pair.predicted}: ${plural(pair.count, "image")}.`));
  return lines;
}
