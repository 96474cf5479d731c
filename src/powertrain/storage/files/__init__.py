"""Local files and directories on machines that several users share: whose they are, and how they are opened."""
