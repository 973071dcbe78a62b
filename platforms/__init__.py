"""One module an architecture that differs: the devices it recognises, their limits, and its orders with their reasons."""
