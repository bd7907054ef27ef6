"""`kvasir chat`: a conversation in the terminal, with a model in this process or with a server."""
