"""`kvasir bench serve`: load on a server, open or closed loop, and what its clients see of it."""
