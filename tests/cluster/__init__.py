"""Two nodes on one machine: network namespaces with a host name, a loopback and an address of their own."""
