"""Files written completely or not at all, and checks of arguments."""
