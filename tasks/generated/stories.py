"""The words of the arithmetic problems: names, things, and sentence templates.

{a} is the first number, {b} the second; they appear in that order in every story.
"""

NAMES = (
    *("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Emma", "Leo", "Nora"),
    *("Jack", "Rosa", "Omar", "Lena", "Ivan", "Maya", "Noah", "Zoe", "Adam", "Ruth"),
    *("Paul", "Sara", "Hugo", "Nina", "Carl", "Ella", "Amir", "Jane", "Luis", "Vera"),
)
OBJECTS = (
    *("apples", "books", "coins", "pens", "cards", "eggs", "balls", "cups", "stamps", "shells"),
    *("cookies", "marbles", "stones", "keys", "plums", "hats", "toys", "seeds", "flowers", "nuts"),
    *("buttons", "stickers", "pencils", "oranges", "candles", "ribbons", "beads", "kites"),
)

# One operation: sign -> questions
STORIES: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have?",
        "{name} has {a} {things} and finds {b} more. How many {things} are there?",
        "{name} has {a} {things}. A friend gives {name} {b} more. How many {things} now?",
        "There are {a} {things} in a box. {name} adds {b} more. How many {things} are in the box?",
        "{name} picks {a} {things}, then {b} more. How many {things} is that together?",
        "There are {a} red {things} and {b} blue {things}. How many {things} are there?",
        "{name} counts {a} {things} on Monday and {b} on Tuesday. How many {things} in total?",
        "What is {a} + {b}?",
    ),
    "-": (
        "{name} has {a} {things} and loses {b}. How many {things} does {name} have left?",
        "{name} has {a} {things} and gives {b} away. How many {things} are left?",
        "{name} has {a} {things} and sells {b}. How many {things} remain?",
        "There are {a} {things} in a box. {name} takes {b}. How many {things} are left in the box?",
        "There were {a} {things}. {name} used {b} of them. How many {things} are left?",
        "{name} needs {a} {things} and has {b}. How many {things} are missing?",
        "Of {a} {things}, {b} are broken. How many {things} are not broken?",
        "What is {a} - {b}?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",
        "There are {a} bags. Each bag holds {b} {things}. How many {things} are there?",
        "{name} makes {a} {things} a day for {b} days. How many {things} is that?",
        "{a} children get {b} {things} each. How many {things} do they get together?",
        "There are {a} rows of {b} {things}. How many {things} are there in all?",
        "{name} buys {a} {things} at {b} dollars each. How many dollars does {name} pay?",
        "What is {a} * {b}?",
    ),
}

# Several operations: a first amount, ...
OPENINGS = (
    "{name} has {a} {things}.",
    "{name} starts the day with {a} {things}.",
    "There are {a} {things} in the shop of {name}.",
    "{name} collected {a} {things} last year.",
)
# ... sign -> (what happens, the line of the answer that works it out), ...
STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "+": (
        ("Then {b} more {things} arrive.", "With the new ones there are {call} {things}."),
        ("{name} buys {b} more.", "After buying, {name} has {call} {things}."),
        ("A friend brings {b} {things}.", "With the friend's gift there are {call} {things}."),
        ("{name} finds {b} in a drawer.", "Together with the found ones: {call} {things}."),
    ),
    "-": (
        ("{name} gives {b} to a neighbor.", "After giving, {call} {things} are left."),
        ("{name} sells {b} of them.", "After selling, {name} has {call} {things}."),
        ("{b} of them get lost.", "Without the lost ones there are {call} {things}."),
        ("A brother of {name} takes {b}.", "The brother leaves {call} {things}."),
    ),
    "*": (
        ("By the summer the number is {b} times as large.", "By the summer it is {call}."),
        ("{name} trades each of them for {b} others.", "After the trade it is {call}."),
        ("A machine turns each one into {b}.", "The machine makes it {call}."),
    ),
}
# ... and the question.
CLOSINGS = (
    "How many {things} does {name} have at the end?",
    "How many {things} are there in the end?",
    "How many {things} is that?",
)
