"""Agent programs: each stands alone, needs the standard library only, and runs as a process of its own."""
