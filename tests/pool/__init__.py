"""Running tests on MPI ranks: a warm pool of them for test bodies, and fresh jobs for tests of how a job ends."""
