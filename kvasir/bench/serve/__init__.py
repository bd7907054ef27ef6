"""`kvasir bench serve`: a load test of a server, with open or closed loop, as its clients see it."""
