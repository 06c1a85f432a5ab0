// Before anything is painted: the colours that were chosen, else those of the system.
document.documentElement.dataset.theme = localStorage.getItem("osd-theme") ?? "auto";
