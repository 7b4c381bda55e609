/* Predictions */
function bars(title, kind, entries) {
  const list = make("ul", { class: `bars ${kind}` }, ...entries.map(([name, p], place) => {
    const fill = make("div", { class: "fill" });
    requestAnimationFrame(() => requestAnimationFrame(() => { fill.style.width = `${p < 0.001 ? 0 : 100 * p}%`; }));
    return make("li", { class: place === 0 ? "best" : "" },
      make("span", { textContent: name, title: name }), make("span", { textContent: percent(p) }),
      make("div", { class: "track", "aria-hidden": "true" }, fill));
  }));
  return make("div", {}, make("h3", { textContent: title }), list);
}
/* Why an answer is doubtful: a word for it and a sentence; null if it is not. */
function doubt(answer) {
  const [best, next] = answer.top;
  if (answer.unknown !== null && answer.unknown >= unfamiliar) {
    return ["perhaps unknown", `This image may belong to none of the known classes: at most ${percent(1 - answer.unknown)} of their images have so high an unknown score.`];
  }
  if (next && best.probability - next.probability < CLOSE) {
    return ["not sure", `${best.class} and ${next.class} are almost equally probable.`];
  }
  return best.probability < UNSURE ? ["not sure", "No class is more probable than all others together."] : null;
}
function verdict(answer) {
  const doubtful = doubt(answer);
  return [make("b", { textContent: answer.class }), make("span", { class: "quiet", textContent: percent(answer.probability) }),
    doubtful ? make("span", { class: "badge", textContent: doubtful[0] }) : null].filter((part) => part !== null);
}
function showAnswer(card, answer, file) {
  const says = card.querySelector(".says");
  if (answer.error) {
    says.replaceChildren(make("p", { class: "wrong", textContent: answer.error }));
    return;
  }
  const doubtful = doubt(answer);
  const parts = [make("div", { class: "verdict" }, ...verdict(answer))];
  card.classList.toggle("doubtful", doubtful !== null);
  if (doubtful) parts.push(make("p", { class: "unsure", textContent: doubtful[1] }));
  const pair = [bars("Classes", "of-classes", answer.top.map((e) => [e.class, e.probability]))];
  if (answer.tasks.length > 1) {
    const tasks = answer.tasks.map((e) => [e.task, e.probability]).sort((a, b) => b[1] - a[1]).slice(0, TOP);
    pair.push(bars("Tasks", "of-tasks", tasks));
  }
  parts.push(make("div", { class: "pair" }, ...pair));
  if (answer.examples && answer.examples.length) {
    parts.push(make("div", {}, make("h3", { textContent: "Nearest stored examples" }),
      make("ul", { class: "near" }, ...answer.examples.map((e) => make("li", { class: e.class === answer.class ? "same" : "", title: `${e.class}, distance ${e.distance.toFixed(2)}` },
        picture(e.picture), make("span", { textContent: e.class }))))));
  }
  if (!readOnly) parts.push(correction(answer, file));
  says.replaceChildren(...parts);
}
/* A wrong answer is corrected: the image is learned with the class that somebody names. */
function correction(answer, file) {
  const name = make("input", { type: "text", maxLength: 80, placeholder: "its class", "aria-label": "The right class" });
  name.setAttribute("list", "class-names");
  const button = make("button", { textContent: "Learn it" }), note = make("p", { class: "small quiet", role: "status" });
  const form = make("form", {}, make("div", { class: "row" }, name, button), note);
  name.classList.add("grow");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const label = name.value.trim(), wrong = badName(label);
    note.className = wrong ? "small wrong" : "small quiet";
    note.textContent = wrong;
    if (wrong) return;
    button.disabled = true;
    try {
      follow(await teach([[label, file]], "corrected image"));
      note.textContent = known.has(label) ? `It is learned as one more image of ${label}.`
        : `${label} is learned as a new class, from this image alone: add more of it.`;
    } catch (error) {
      note.className = "small wrong";
      note.textContent = error.message;
      button.disabled = false;
    }
  });
  return make("details", { class: "fix" }, make("summary", { textContent: `Not ${answer.class}?` }), form);
}
async function ask(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/") || /\.tiff?$/i.test(file.name));
  if (!images.length) { if (files.length) say("That is not an image."); return; }
  $("drop").classList.add("low");
  $("results").replaceChildren();
  for (const file of images) {
    const address = URL.createObjectURL(file);
    const shown = picture(address, "", "The image to classify");
    shown.addEventListener("load", () => URL.revokeObjectURL(address));
    shown.addEventListener("error", () => shown.replaceWith(make("span", { class: "quiet small", textContent: "no preview" })));
    const name = file.name || "pasted image";
    const card = make("article", { class: "card result", "aria-busy": "true" },
      make("div", { class: "shown" }, make("div", { class: "frame" }, shown), make("div", { class: "path", textContent: name })),
      make("div", { class: "says" }, make("p", { class: "quiet", textContent: "Classifying …" })));
    $("results").append(card);
    const form = new FormData();
    form.append("files", file, name);
    try {
      const content = await call(`predict?top=${TOP}&tasks=true&examples=${EXAMPLES}`, { method: "POST", body: form });
      const answer = content.answers[0];
      showAnswer(card, answer, file);
      say(answer.error || `${name}: ${answer.class}, ${percent(answer.probability)}`);
    } catch (error) {
      showAnswer(card, { error: error.message });
      say(error.message);
    }
    card.setAttribute("aria-busy", "false");
  }
}
$("images").addEventListener("change", (event) => { ask(event.target.files); });
$("images").addEventListener("click", (event) => { event.target.value = ""; });
addEventListener("paste", (event) => { if (event.clipboardData.files.length) ask(event.clipboardData.files); });
addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").classList.remove("over"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  ask(event.dataTransfer.files);
});
