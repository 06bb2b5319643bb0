"""The closed form: memory and time of a job on any device, with any engine, over any number of nodes."""
