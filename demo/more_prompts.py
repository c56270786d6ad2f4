"""Prompts from patterns, beside the hand-written ones: python demo/more_prompts.py

Ten kinds, up to 110 prompts each, drawn with a fixed seed. People ask a deployed model the same kinds of question again
and again with other names in them; hand-written prompts alone are each one of its kind.
"""

from __future__ import annotations

import itertools
import json
import random


def words(text: str) -> list[str]:
    """What stands between the commas."""
    return [word.strip() for word in text.split(",")]


NAMES = words(
    "Anna, Ben, Carla, David, Emma, Farid, Grace, Hugo, Ines, Jonas, Kira, Leo, Maya, Nils, Olga, Pablo, Rosa, "
    "Sam, Tara, Victor"
)
ITEMS = words("apples, pens, notebooks, stickers, marbles, cookies, tickets, balloons, books, cups, oranges, candles")
TOPICS = words(
    "the water cycle, photosynthesis, gravity, electricity, magnets, the solar system, volcanoes, earthquakes, "
    "tides, rainbows, the human heart, digestion, sleep, memory, inflation, interest rates, taxes, elections, "
    "recycling, batteries, the internet, computers, satellites, airplanes, bridges, vaccines, bacteria, "
    "dinosaurs, glaciers, deserts"
)
PLACES = words(
    "France, Japan, Brazil, Egypt, India, Canada, Australia, Kenya, Italy, Mexico, Norway, Peru, Thailand, "
    "Greece, Spain, China, Germany, Morocco, Chile, Vietnam"
)
ANIMALS = words(
    "elephants, penguins, whales, bees, owls, wolves, dolphins, snakes, turtles, spiders, bats, eagles, foxes, "
    "frogs, ants"
)
GOALS = words(
    "learn a new language, save money, sleep better, eat healthier, get fit, read more books, wake up earlier, "
    "manage my time, make new friends, reduce stress, stop procrastinating, prepare for a job interview, write a "
    "good essay, learn to cook, start a small garden, train for a marathon, learn to play the guitar, give a good "
    "speech, study for an exam, organise my desk, plan a trip, start a small business, take better photos, keep a "
    "diary, drink more water, learn to draw, improve my memory, build a website, raise a puppy, learn to swim"
)
PAIRS = words(
    "cats and dogs, tea and coffee, books and films, trains and planes, summer and winter, cities and villages, "
    "oil paint and watercolour, running and swimming, gas and electric cars, the sun and the moon, lakes and "
    "rivers, email and letters, tablets and laptops, bicycles and motorcycles, chess and checkers, butter and "
    "olive oil, football and basketball, renting and buying a home, public and private schools, pianos and "
    "violins, bread and rice, mountains and beaches, novels and poems, wood and steel, breakfast and dinner, "
    "frogs and toads, planets and stars, cash and credit cards, online and classroom lessons, moths and "
    "butterflies"
)
REQUESTS = words(
    "ask for a day off on Friday, thank them for the birthday gift, apologise for being late, invite them to "
    "dinner on Saturday, ask for a refund, confirm our meeting on Monday, cancel my appointment, ask about the "
    "price of the room, congratulate them on the new job, ask for help with the project, say that the report is "
    "finished, complain about a broken lamp, ask for a recommendation letter, remind them of the deadline, say "
    "thank you for the interview, ask to move the call to Tuesday, order ten more chairs, ask for directions to "
    "the office, accept the invitation, tell them about the new opening hours"
)
PEOPLE = words(
    "my boss, my teacher, a customer, my neighbour, my landlord, a colleague, the hotel, a friend, the library, my team"
)
THINGS = words(
    "fruits, countries in Africa, winter sports, kitchen tools, musical instruments, farm animals, pizza "
    "toppings, school subjects, famous inventors, kinds of weather, things to pack for a trip, healthy snacks, "
    "board games, kinds of trees, ocean animals, jobs in a hospital, gifts for a friend, hobbies, spices, "
    "vegetables, ways to save energy, rainy day activities, kinds of fabric, household chores, party games, "
    "summer activities, planets, colours, breakfast foods, safety rules"
)
FUNCTIONS = words(
    "adds two numbers, finds the largest number in a list, reverses a string, counts the vowels in a string, "
    "checks if a number is even, checks if a number is prime, computes a factorial, sums a list of numbers, sorts "
    "a list of names, removes duplicates from a list, counts the words in a sentence, converts Celsius to "
    "Fahrenheit, finds the average of a list, finds the smallest number in a list, checks if a string is a "
    "palindrome, prints the first ten squares, computes the area of a circle, merges two lists, reads a file and "
    "prints its lines, counts how often each letter appears, computes the Fibonacci sequence, multiplies all "
    "numbers in a list, finds the longest word in a list, converts a string to upper case, prints a "
    "multiplication table"
)
LANGUAGES = words("Python, Python, Python, JavaScript, Java")
HEROES = words(
    "a brave mouse, a lost robot, a young wizard, a shy dragon, an old sailor, a curious cat, a little star, a "
    "clever fox, a lonely giant, a girl who could fly, a boy and his kite, a baker, a talking tree, a tiny ghost, "
    "a gardener, an astronaut, a painter, a clock maker, a lighthouse keeper, a snowman"
)
SCENES = words(
    "in a deep forest, on a small island, in a big city, on the moon, in a castle, by the sea, in the mountains, "
    "in an old library, at a busy market, in a quiet village"
)
JOBS = words("nurse, teacher, plumber, baker, pilot, lawyer, farmer, chef, designer, driver")


# What is asked of every word of a list, kind by kind.
ASKED: dict[str, list[tuple[list[str], list[str]]]] = {
    "explain": [
        (
            TOPICS,
            [
                "Explain {} to a child.",
                "Explain {} in simple words.",
                "What should everyone know about {}?",
                "Give a short introduction to {}.",
                "Why is it important to understand {}?",
            ],
        )
    ],
    "fact": [
        (
            PLACES,
            [
                "What is {} famous for?",
                "Tell me about the food of {}.",
                "Tell me about the history of {}.",
                "What is the geography of {} like?",
            ],
        ),
        (ANIMALS, ["What do {} eat?", "Where do {} live?", "Tell me three facts about {}."]),
    ],
    "advice": [
        (
            GOALS,
            [
                "How can I {}?",
                "Give me some tips to {}.",
                "I want to {}. Where should I start?",
                "What is the best way to {}?",
            ],
        )
    ],
}


def prompts(kind: str, draw: random.Random) -> list[str]:
    """Every prompt that the patterns of a kind make, in a seeded order."""
    made = [each.format(word) for asked, patterns in ASKED.get(kind, ()) for word in asked for each in patterns]
    if kind == "math":
        for name, item in itertools.product(NAMES, ITEMS):
            a, b, c = draw.randint(6, 60), draw.randint(2, 9), draw.randint(2, 12)
            made += [
                f"{name} has {a} {item} and buys {c} more. How many {item} does {name} have now?",
                f"{name} has {a * b} {item} and shares them equally among {b} friends. How many does each friend get?",
                f"{item.capitalize()} cost ${c} each. How much do {b} {item} cost?",
                f"{name} had {a + c} {item} and gave away {c}. How many {item} are left?",
                f"There are {b} boxes with {c} {item} in each box. How many {item} are there in total?",
            ]
        for a, b in itertools.product(range(12, 60, 7), range(3, 30, 5)):
            made += [f"What is {a} plus {b}?", f"What is {a} times {b}?", f"What is {a} minus {b}? Explain each step."]
    if kind == "compare":
        for pair in PAIRS:
            made += [
                f"Compare {pair}.",
                f"What are the main differences between {pair}?",
                f"What do {pair} have in common, and how do they differ?",
                f"Which is better, {' or '.join(pair.split(' and '))}? Give reasons.",
            ]
    if kind == "email":
        for person, request in itertools.product(PEOPLE, REQUESTS):
            made += [
                f"Write a short email to {person} to {request}.",
                f"Write a polite message to {person}: {request}. Sign it as {draw.choice(NAMES)}.",
            ]
    if kind == "list":
        for thing in THINGS:
            n = draw.choice(["five", "six", "seven", "eight", "ten"])
            made += [f"List {n} {thing}.", f"Name {n} {thing}.", f"Give me a numbered list of {n} {thing}."]
            made += [f"List {n} {thing} and describe each in one sentence."]
    if kind == "code":
        for function in FUNCTIONS:
            language = draw.choice(LANGUAGES)
            made += [
                f"Write a {language} function that {function}.",
                f"Write a {language} program that {function}. Add comments.",
                f"Show me how to write code that {function} in {language}, with an example.",
            ]
    if kind == "story":
        for hero, scene in itertools.product(HEROES, SCENES):
            made += [f"Write a short story about {hero} {scene}.", f"Tell me a bedtime story about {hero} {scene}."]
    if kind == "extract":
        for _ in range(100):
            name, job, place, item = (draw.choice(w) for w in (NAMES, JOBS, PLACES, ITEMS))
            age, price = draw.randint(21, 70), draw.randint(3, 90)
            made += [
                f'Give name, age and job as JSON: "{name} is {age} years old and works as a {job} in {place}."',
                f'List name, item and price: "{name} from {place} bought {item} for ${price}."',
                f'Where does the person live, and what is the job? "My name is {name}. I am a {job} from {place}."',
            ]
    draw.shuffle(made)
    return made


def main() -> None:
    """Print up to 110 prompts of each kind as JSONL."""
    for kind in ("extract", "list", "explain", "email", "code", "math", "story", "fact", "compare", "advice"):
        made = list(dict.fromkeys(prompts(kind, random.Random(kind))))
        for number, text in enumerate(made[:110], start=101):
            message = {"role": "user", "content": text}
            print(json.dumps({"id": f"{kind}-{number:03d}", "kind": kind, "messages": [message]}))


if __name__ == "__main__":
    main()
