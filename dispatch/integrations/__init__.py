"""Other people's engines and models on attnmux. Each module imports its library only when asked to register."""
