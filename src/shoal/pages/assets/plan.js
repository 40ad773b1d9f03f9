// The page of a plan or of a graph.
"use strict";

addThemeButton(document.querySelector(".top"));
for (const section of document.querySelectorAll("section.picture")) {
  new Picture(section, dataOf(section.dataset.name));
}
