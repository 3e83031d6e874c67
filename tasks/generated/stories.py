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
    *(
        "sweets",
        "dollars",
        "cats",
        "dogs",
        "cars",
        "bananas",
        "cakes",
        "candies",
        "birds",
        "chairs",
    ),
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
        "I have {a} {things} and get {b} more. How many {things} do I have?",
        "I have {a} {things} and buy {b} more, how many do I have now?",
        "If I have {a} {things} and you give me {b}, how many {things} do I have?",
        "{name} had {a} {things}. Then {name} got {b} more. How many {things} are there now?",
        "{a} {things} are on the table and {b} more on the chair. How many altogether?",
        "There are {a} {things} and {b} more arrive. How many are there now?",
        "{name} has {a} {things} and I have {b}. How many do we have together?",
        "{name} walked {a} miles today and {b} yesterday. How many miles in total?",
        "I read {a} pages in the morning and {b} in the evening, how many pages in total?",
        "My class has {a} girls and {b} boys. How many children are there?",
        "A shirt costs {a} dollars and a hat costs {b}. How much do I pay for both?",
        "I saved {a} dollars and got {b} for my birthday. How much money do I have?",
        "{name} is {a} years old. How old is {name} in {b} years?",
        "We won {a} games last year and {b} this year, how many altogether?",
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
        "I have {a} {things} and eat {b}. How many are left?",
        "I had {a} {things} and lost {b}, how many do I have left?",
        "If I have {a} {things} and give you {b}, how many {things} do I have left?",
        "{name} had {a} {things} and {b} broke. How many {things} are left?",
        "I bought {a} {things} and used {b}. How many are still there?",
        "There are {a} {things} and {b} go away. How many stay?",
        "I have {a} {things}. I take away {b}. How many remain?",
        "There were {a} people in the room and {b} left. How many are still there?",
        "A bus has {a} people, {b} get off. How many are on it?",
        "I had {a} dollars and spent {b}. How much money is left?",
        "A book has {a} pages and I read {b}. How many pages are left?",
        "{name} had {a} {things} and ate {b}, how many are left?",
        "The trip is {a} miles and we drove {b}. How far is it still?",
        "I am {a} and my brother is {b} years younger. How old is he?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",
        "There are {a} bags. Each bag holds {b} {things}. How many {things} are there?",
        "{name} makes {a} {things} a day for {b} days. How many {things} is that?",
        "{a} children get {b} {things} each. How many {things} do they get together?",
        "There are {a} rows of {b} {things}. How many {things} are there in all?",
        "{name} buys {a} {things} at {b} dollars each. How many dollars does {name} pay?",
        "What is {a} * {b}?",
        "I have {a} bags with {b} {things} in each. How many {things} do I have?",
        "{a} boxes, {b} {things} in each box, how many {things}?",
        "If I buy {a} {things} every day for {b} days, how many do I have?",
        "{a} friends have {b} {things} each. How many altogether?",
        "Each of {a} people brings {b} {things}. How many {things} are there?",
        "A ticket costs {a} dollars. How much do {b} tickets cost?",
        "One coffee is {a} dollars, how much are {b} coffees?",
        "{a} bags with {b} {things} each, how many {things} is that?",
        "A car has {a} wheels. How many wheels do {b} cars have?",
        "I run {a} miles a day. How many miles in {b} days?",
        "There are {a} tables with {b} chairs each. How many chairs in total?",
        "{name} works {a} hours a day for {b} days. How many hours is that?",
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
