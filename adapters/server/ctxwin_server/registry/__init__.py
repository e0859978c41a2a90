"""Objects by id: chunks, libraries, windows and their live streams, and the operations on them."""
