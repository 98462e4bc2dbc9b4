"""What training by a plan takes, before anything is trained: time, memory, messages; and the fastest plan."""
