"""What tests share: real ranks, fake ones, models, plans, and what they are held against."""
