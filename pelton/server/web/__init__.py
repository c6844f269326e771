"""The chat page: plain HTML, CSS and ES modules; nothing is built."""
