"""Task classes, rows of text from files and hubs, chat text and tokens, packs of documents, random access to packs."""
