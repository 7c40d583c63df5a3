"""Tests of the front end, over real sockets, against real daemons."""
