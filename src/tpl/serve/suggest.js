/* Suggestions: which of many images are worth a label; those that get a name are learned */
let worth = [];  // pairs of an image and the input for its name
function suggestProblem(text) {
  $("suggest-problem").textContent = text;
  $("suggest-problem").hidden = !text;
}
function reason(entry) {
  const [best, next] = entry.top.map((e) => `${e.class} ${percent(e.probability)}`);
  const close = entry.top.length > 1 && entry.unsure <= 1 - (entry.top[0].probability - entry.top[1].probability) + 1e-5;
  return close ? `${best} or ${next}` : `${best}, but perhaps unknown`;
}
$("unlabelled").addEventListener("click", (event) => { event.target.value = ""; });
$("unlabelled").addEventListener("change", async () => {
  const files = [...$("unlabelled").files], count = $("unlabelled-count");
  suggestProblem("");
  $("worth").replaceChildren();
  $("teach-worth").hidden = true;
  count.textContent = `Looking at ${plural(files.length, "image")} …`;
  try {
    const entries = inFolders(files.map((file) => ["images", file])), form = new FormData();
    form.append("file", await zip(entries), "images.zip");
    const found = await call(`suggest?count=${SUGGESTED}`, { method: "POST", body: form });
    const images = new Map(entries);
    count.textContent = `${found.suggested.length} of ${plural(found.images, "image")}, the most useful first.`;
    worth = found.suggested.map((entry) => {
      const name = make("input", { type: "text", maxLength: 80, placeholder: "its class", "aria-label": "Its class" });
      name.setAttribute("list", "class-names");
      return [images.get(entry.path), name, reason(entry)];
    });
    $("worth").replaceChildren(...worth.map(([file, name, why]) => make("li", {}, thumbnails([file]),
      make("div", {}, make("span", { class: "quiet", textContent: why }), name))));
    $("teach-worth").hidden = false;
  } catch (error) {
    count.textContent = "";
    suggestProblem(error.message);
  }
});
$("suggest").addEventListener("submit", async (event) => {
  event.preventDefault();
  const pairs = worth.map(([file, name]) => [name.value.trim(), file]).filter(([name]) => name);
  suggestProblem(pairs.length ? pairs.map(([name]) => badName(name)).find((text) => text) || "" : "Name at least one image.");
  if (!$("suggest-problem").hidden) return;
  try {
    follow(await busy($("teach-worth"), "Sending …", () => teach(pairs, "images with new names")));
    $("worth").replaceChildren();
    $("teach-worth").hidden = true;
    $("unlabelled-count").textContent = "";
  } catch (error) {
    suggestProblem(error.message);
  }
});

addRow();
showModel().then(async () => {
  const { tasks } = await call("tasks");
  tasks.filter((job) => job.state === "queued" || job.state === "learning").forEach(follow);
}).catch(() => {});
