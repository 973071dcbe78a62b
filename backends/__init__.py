"""One module a backend: its declaration, and an adapter that imports the kernel library only when used."""
