"use strict";

// Tables: a click on a head sorts by that column, numbers by value, missing ones last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const body = head.closest("table").tBodies[0];
    const column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (left, right) => {
      const a = value(left), b = value(right);
      if (a === "" || b === "") return (a === "") - (b === "");
      const numbers = !Number.isNaN(Number(a)) && !Number.isNaN(Number(b));
      const order = numbers ? Number(a) - Number(b) : a.localeCompare(b);
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}

// Strategies: hovering one lights it up everywhere, a chip takes it out everywhere.
const named = [...document.querySelectorAll("[data-strategy]")];
for (const element of named) {
  const same = named.filter((other) => other.dataset.strategy === element.dataset.strategy);
  element.addEventListener("mouseenter", () => {
    document.body.classList.add("focus");
    for (const other of same) other.classList.add("lit");
  });
  element.addEventListener("mouseleave", () => {
    document.body.classList.remove("focus");
    for (const other of same) other.classList.remove("lit");
  });
  if (element.tagName === "BUTTON") {
    element.addEventListener("click", () => {
      const off = element.getAttribute("aria-pressed") === "true";
      element.setAttribute("aria-pressed", String(!off));
      for (const other of same) other.classList.toggle("off", off);
    });
  }
}

// Paper can't be clicked open.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
