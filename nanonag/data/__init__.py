"""Data sets: reading text, tokenizing it into a folder, and batches from that folder."""
