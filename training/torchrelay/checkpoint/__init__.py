"""The checkpoint protocol: formats, history, generations, commit and reading. No torch, no server, only the six store verbs."""
