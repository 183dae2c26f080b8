"""The engine of nanoNAG: everything but the schemes. It imports no file of the root."""
