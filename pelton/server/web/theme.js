// Runs before anything is drawn, so that nobody sees the other theme flash.
{
  let theme = null;
  try {
    theme = localStorage.getItem("pelton-theme");
  } catch {
    // A browser without storage follows the system.
  }
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
}
