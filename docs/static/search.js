// SPDX-License-Identifier: Apache-2.0
// The search of sphinx lists a page for its title, each heading, index entry and name: show the best of them only.
document.addEventListener("DOMContentLoaded", () => {
  const performSearch = Search._performSearch;
  Search._performSearch = (...query) => {
    const best = new Map(); // the best results are the last ones
    for (const result of performSearch(...query)) {
      best.delete(result[0]);
      best.set(result[0], result);
    }
    return [...best.values()];
  };
});
