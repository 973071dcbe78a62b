"""The contract and the dispatcher: what backends, platforms and engines share. Importing it does nothing."""
