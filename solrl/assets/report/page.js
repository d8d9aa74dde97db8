"use strict";
// Values under the pointer (or, with the arrow keys, under the focus) of every chart.
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.dataset.points);
  const rule = plot.querySelector(".rule"), tip = plot.querySelector(".tip");
  let current = data.x.length - 1;

  function show(index) {
    current = index;
    const left = data.at[index] + "%";
    rule.style.left = left;
    tip.replaceChildren();
    const head = document.createElement("em");
    head.textContent = "step " + data.x[index];
    tip.append(head);
    for (const [name, color, texts] of data.s) {
      if (texts[index] === null) continue;
      const row = document.createElement("div"), dot = document.createElement("i");
      row.className = "c" + color;
      row.append(dot, name + " ", Object.assign(document.createElement("b"), { textContent: texts[index] }));
      tip.append(row);
    }
    rule.hidden = tip.hidden = false;
    const width = tip.offsetWidth, at = plot.clientWidth * data.at[index] / 100;
    const right = at + 12 + width <= plot.clientWidth + 8;
    tip.style.left = Math.max(-40, right ? at + 12 : at - 12 - width) + "px";
  }
  function hide() { rule.hidden = tip.hidden = true; }

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), at = 100 * (event.clientX - box.left) / box.width;
    let nearest = 0;
    data.at.forEach((value, i) => { if (Math.abs(value - at) < Math.abs(data.at[nearest] - at)) nearest = i; });
    show(nearest);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(current); });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { event.preventDefault(); show(Math.min(Math.max(current + move, 0), data.x.length - 1)); }
  });
}
