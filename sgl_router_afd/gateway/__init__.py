"""The data plane `smg`: the gateway of that name as a child process, told of servers by a file."""
