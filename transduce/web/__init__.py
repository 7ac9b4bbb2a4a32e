"""The explorer: a page in the browser that shows what a transducer does."""
