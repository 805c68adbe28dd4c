"""What the engine did, told to people and their tools. Everything here reads step records and keeps no other source."""
