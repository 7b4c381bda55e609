/* Checking the chosen images before they are learned: findings with the images themselves, and a way to mend each */
function drop(files) {
  for (const row of rows) {
    row.files = row.files.filter((file) => !files.includes(file));
    row.count();
  }
}
function move(file, name) {
  drop([file]);
  const row = rows.find((other) => other.name.value.trim() === name) || addRow(name);
  row.files.push(file);
  row.count();
}
function thumbnails(files) {
  return make("div", { class: "thumbs" }, ...files.map((file) => {
    const address = URL.createObjectURL(file), image = picture(address, "", file.name);
    image.addEventListener("load", () => URL.revokeObjectURL(address));
    image.addEventListener("error", () => image.remove());
    return image;
  }));
}
/* One finding: images, a sentence, and buttons of [text, what to do]; once mended it is gone. */
function finding(files, text, ...ways) {
  const element = make("div", { class: files.length ? "finding" : "finding plain" }, files.length ? thumbnails(files) : null, make("span", { textContent: text }));
  if (ways.length) {
    element.append(make("div", { class: "row" }, ...ways.map(([title, mend]) => {
      const button = make("button", { type: "button", class: "link small", textContent: title });
      button.addEventListener("click", () => {
        mend();
        const section = element.parentElement;
        element.remove();
        if (!section.querySelector(".finding")) section.remove();
      });
      return button;
    })));
  }
  return element;
}
function findings(title, entries) {
  return entries.length ? make("div", {}, make("h3", { textContent: title }), ...entries) : null;
}
function showFindings(found, files) {
  const at = (path) => files.get(path);
  const named = (text) => [...files.keys()].find((path) => text.startsWith(path));
  const { leave_one_out: measured, twice_the_images: twice } = found;
  const parts = [
    findings("Unreadable", found.unreadable.map((text) => {
      const path = named(text), file = at(path);
      return finding([], file ? `${file.name}${text.slice(path.length)}` : text, ...(file ? [["Leave it out", () => drop([file])]] : []));
    })),
    findings("The same picture", found.equal_pictures.map((group) => {
      const same = group.files.map(at).filter((file) => file);
      const where = group.classes.length > 1 ? `in ${group.classes.join(" and ")}: which is right?` : same.map((file) => file.name).join(", ");
      const ways = group.classes.length > 1
        ? group.classes.map((name) => [`Keep in ${name}`, () => { drop(same); move(same[0], name); }])
        : [["Keep one", () => drop(same.slice(1))]];
      return finding(same, where, ...ways);
    })),
    findings("Perhaps a wrong class", found.likely_wrong_labels.map((entry) => {
      const file = at(entry.file);
      return finding([file], `${file.name} is named ${entry.label}, and looks like ${entry.likely}.`,
        [`Move to ${entry.likely}`, () => move(file, entry.likely)], ["Leave it out", () => drop([file])], ["It is right", () => {}]);
    })),
    findings("Classes that look alike", found.classes_that_look_alike.map((pair) => finding([],
      `${pair.classes.join(" and ")}: ${pair.confused} of ${pair.images} images are taken for the other.`))),
    findings("Names that are nearly equal", found.names_alike.map((group) => finding([], group.map((name) => `“${name}”`).join(" and ")))),
  ].filter((part) => part !== null);
  if (!parts.length) parts.push(make("p", { class: "fine", textContent: "Nothing to mend was found." }));
  if (measured.images) {
    const more = twice ? ` With twice as many of every class: about ${percent(twice.doubled)}.` : "";
    parts.push(make("p", { class: "quiet", textContent: `${measured.right} of ${measured.images} images are recognised by all others (${between([measured.low, measured.high])}).${more}` }));
  }
  $("findings").replaceChildren(...parts);
  $("findings").hidden = false;
}
$("check").addEventListener("click", async () => {
  problem(mistake());
  $("findings").hidden = true;
  if (!$("problem").hidden) return;
  try {
    await busy($("check"), "Checking …", async () => {
      const entries = inFolders(chosenPairs()), form = new FormData();
      form.append("file", await zip(entries), "images to check.zip");
      showFindings(await call("check", { method: "POST", body: form }), new Map(entries));
    });
  } catch (error) {
    problem(error.message);
  }
});
