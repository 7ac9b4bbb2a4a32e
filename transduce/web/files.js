// Files that the page makes.

// Download a file, named after an input.
export function download(blob, name, suffix) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${name.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 60)}${suffix}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
