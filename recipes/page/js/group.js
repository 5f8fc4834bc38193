"use strict";
/* Draw the microscopes of this page. In: elements with a step in `data-step`, as microscope.py writes it. */
for (const element of document.querySelectorAll("[data-step]")) {
  microscope(element, JSON.parse(element.dataset.step));
}
