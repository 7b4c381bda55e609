"use strict";
const $ = (id) => document.getElementById(id);
const RARE = 0.05, RARE_ENOUGH = 0.2;  // the share of known images that may be called unknown, and its upper limit
const TOP = 5, EXAMPLES = 12, POLL = 700;
const UNSURE = 0.5, CLOSE = 0.15;  // a probability, and a distance to the next class, below which an answer is doubtful
const SUGGESTED = 8;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
const plural = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
function percent(p) {
  if (p > 0 && p < 0.001) return "< 0.1 %";
  if (p < 1 && p > 0.999) return "> 99.9 %";
  return `${(100 * p).toFixed(p > 0.0995 ? 0 : 1)} %`;
}
function between([low, high]) { return `${Math.round(100 * low)} to ${Math.round(100 * high)} %`; }
function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
function bytes(n) {
  const units = ["bytes", "kB", "MB", "GB"];
  let i = 0;
  while (n >= 1000 && i < 3) { n /= 1000; i += 1; }
  return `${n.toFixed(n < 10 && i ? 1 : 0)} ${units[i]}`;
}
const say = (text) => { $("status").textContent = text; };

/* The token: from the URL's fragment, which is never sent, or from the dialog when the server needs it. */
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("tpl-token", given);
  history.replaceState(null, "", location.pathname);
}
function askToken(refused) {
  $("refused").hidden = !refused;
  $("token").value = "";
  $("ask").returnValue = "cancel";
  $("ask").showModal();
  return new Promise((resolve) => {
    $("ask").addEventListener("close", () => {
      const token = $("token").value.trim();
      if ($("ask").returnValue !== "ok" || !token) return resolve(false);
      sessionStorage.setItem("tpl-token", token);
      resolve(true);
    }, { once: true });
  });
}
async function call(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem("tpl-token");
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch {
      throw new Error("The server cannot be reached. Is it still running?");
    }
    if (response.status === 401) {
      sessionStorage.removeItem("tpl-token");
      if (await askToken(token !== null)) continue;
      throw new Error("This needs the server's token.");
    }
    const content = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(content.error || `The server answered ${response.status}.`);
    return content;
  }
}

/* The model's classes */
let known = new Set(), readOnly = false;
let unfamiliar = Infinity;  // unknown score from which an image is called unknown; never for a model of few images
async function showModel() {
  let model;
  try {
    model = await call("model?pictures=true");
  } catch (error) {
    $("about").textContent = error.message;
    return;
  }
  known = new Set(model.classes);
  const share = Math.max(RARE, model.rejection_floor ?? 1);  // null: the method has no unknown score
  unfamiliar = share <= RARE_ENOUGH ? 1 - share - 1e-9 : Infinity;
  $("about").textContent = model.classes.length
    ? `This model knows ${plural(model.classes.length, "class", "classes")}, learned in ${plural(model.tasks.length, "task")}.`
    : "This model has not learned anything yet. Add a class to begin.";
  $("count").textContent = model.classes.length ? String(model.classes.length) : "";
  $("facts").textContent = `${model.encoder.name} encoder, ${bytes(model.sizes.directory_bytes)}, `
    + `${plural(model.sizes.stored_images, "stored image")}.`;
  readOnly = model.read_only;
  for (const id of ["teach", "advice"]) $(id).hidden = readOnly;
  $("hint").hidden = readOnly || !model.classes.length;
  $("class-names").replaceChildren(...model.classes.map((name) => make("option", { value: name })));
  const pictures = model.pictures || {};
  $("tasks").replaceChildren(...model.tasks.map((task) => make("div", { class: "task" },
    make("h3", {}, make("b", { textContent: task.name }),
      make("span", { textContent: measured(task) })),
    make("ul", { class: "chips" }, ...task.classes.map((name) => make("li", {}, chip(name, pictures[name])))))));
}
/* The accuracy of a task when it was learned; of few images as a count: 3 of 4 is not 75 %. */
function measured(task) {
  const images = task.measured_on;
  if (task.accuracy === null) return plural(task.images, "image");
  return `${images < 30 ? `${Math.round(task.accuracy * images)} of ${images}` : percent(task.accuracy)} right when learned`;
}
function chip(name, shown) {
  const parts = [shown ? picture(shown, "picture") : null, make("span", { textContent: name })];
  const kind = { class: shown ? "chip" : "chip plain", title: name };
  if (readOnly) return make("div", kind, ...parts);
  const button = make("button", { ...kind, type: "button" }, ...parts);
  button.addEventListener("click", () => { editClass(name); });
  return button;
}

/* Renaming and removing a class */
let edited = "";
function editClass(name) {
  edited = name;
  $("edit-title").textContent = name;
  $("edit-name").value = name;
  $("edit-warning").hidden = true;
  $("edit-problem").hidden = true;
  $("remove").textContent = "Remove";
  $("edit").showModal();
}
async function changeClass(path, fields) {
  const form = new FormData();
  Object.entries(fields).forEach(([name, value]) => form.append(name, value));
  for (const id of ["rename", "remove"]) $(id).disabled = true;
  $("edit").close();  // one dialog at a time: the token may be asked for
  try {
    await call(`classes/${path}`, { method: "POST", body: form });
    await showModel();
  } catch (error) {
    $("edit").showModal();
    $("edit-problem").textContent = error.message;
    $("edit-problem").hidden = false;
  }
  for (const id of ["rename", "remove"]) $(id).disabled = false;
}
$("edit-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = $("edit-name").value.trim();
  if (!name || name === edited) $("edit").close();
  else changeClass("rename", { class: edited, name });
});
$("remove").addEventListener("click", () => {
  if ($("edit-warning").hidden) {
    $("edit-warning").hidden = false;
    $("remove").textContent = "Remove for good";
  } else changeClass("remove", { class: edited });
});
$("edit-cancel").addEventListener("click", () => { $("edit").close(); });
function picture(source, kind = "", alt = "") {
  const image = make("img", { src: source, alt, class: kind });
  image.addEventListener("load", () => image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) < 64));
  return image;
}
