"""What things cost, and on what they run; whoever weighs one thing against another asks here."""
