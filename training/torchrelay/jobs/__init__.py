"""Jobs: what is trained. A job is a function that builds model, optimizer, dataset and loss; the default one is a byte-level GPT."""
