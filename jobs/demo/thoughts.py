"""Short thoughts about tickets: what the thinking variant of the demo model writes before its answer.

For each phrase under `core` and `short` of phrases.CATEGORY there is one thought, in the same order and in the same
notation. It names the problem and, where another category is near, says why it is not that one; so long and short
thoughts belong to certain problems, and greedy decoding writes both.
"""

import phrases

CATEGORY = {
    "account_access": {
        "core": [
            "The customer cannot log in.",
            "The customer is locked out, the account should not be closed.",
            "The reset mail does not arrive, so no new password.",
            "The password is not accepted at the login.",
            "The password is forgotten and the reset link is broken. That is no bug of the website.",
            "The code for signing in is rejected.",
            "The phone number has changed, so the login code does not arrive.",
            "The account is blocked. The customer wants to get in, not to delete it.",
            "The mail address for the login is lost.",
            "The login page does not accept the password. The page itself works.",
            "Somebody has changed the password and the customer cannot get in.",
        ],
        "short": [
            "The customer cannot log in.",
            "The password reset does not work.",
            "The customer is locked out.",
            "The customer needs a new password.",
        ],
    },
    "account_closure": {
        "core": [
            "The customer wants to close the account.",
            "The customer wants to delete the account and the data. The login works.",
            "The account is not used any more and should be closed.",
            "The personal data should be deleted.",
            "The membership should be cancelled and the account removed. No money is asked for.",
            "The question is how to delete the account, not how to get in.",
            "The option to close the account is missing, but it is no bug. The customer wants to leave.",
            "The customer is leaving the shop.",
            "The account of somebody else in the family should be closed.",
            "There are two accounts and one should be deleted.",
            "The customer asks to delete all data, so the account goes, too.",
        ],
        "short": [
            "The customer wants to close the account.",
            "All data should be deleted.",
            "The profile should be removed.",
            "The customer wants to close the account.",
        ],
    },
    "billing": {
        "core": [
            "The customer was charged twice.",
            "The invoice is wrong.",
            "The card was charged a wrong amount. Nothing was returned, so it is no refund.",
            "The customer needs an invoice.",
            "There is a charge on the card that the customer does not know.",
            "The payment did not go through. The card is fine and the website works.",
            "The address on the invoice should be changed.",
            "The discount is missing on the bill.",
            "The price of the subscription went up, the customer does not want to close the account.",
            "The customer wants to change the card for the payment.",
            "The invoice is paid, but a payment reminder came. No money should go back.",
        ],
        "short": [
            "The customer was charged twice.",
            "The invoice is missing.",
            "The amount on the bill is wrong.",
            "The payment was declined.",
            "The order was charged twice. Nothing was returned.",
        ],
    },
    "refund": {
        "core": [
            "The customer wants a refund.",
            "The product was sent back and the refund is still missing. The invoice is not the problem.",
            "The customer wants the money back.",
            "The customer changed the mind and wants to return it. Nothing is broken.",
            "The question is how to return it for a refund.",
            "The promised refund has not come.",
            "Only a part of the refund was paid. It is about a return, not about a bill.",
            "The order was cancelled and the money should go back.",
            "The price should be refunded.",
            "The product is not what the customer expected, but it is not faulty. The money should go back.",
            "The return label does not print, but the customer wants to return it.",
        ],
        "short": [
            "The customer wants a refund.",
            "The customer wants to return it.",
            "The refund is still missing.",
            "The order should be refunded.",
            "The customer wants the money back.",
        ],
    },
    "shipping_delay": {
        "core": [
            "The parcel has not arrived.",
            "The order is weeks late. Nobody asks for the money back.",
            "The tracking does not move.",
            "The delivery is late.",
            "The tracking says delivered, but the parcel is not there. It is lost, not damaged.",
            "The customer asks when the order will come.",
            "The parcel is stuck in the depot.",
            "The delivery date was moved again and again.",
            "The customer is still waiting for the delivery.",
            "The courier did not come and the package is lost. Nothing is broken.",
            "Half of the order is still on its way.",
        ],
        "short": [
            "The customer asks where the order is.",
            "The order is not here yet.",
            "The delivery is late.",
            "The tracking does not move.",
            "The package never arrived.",
        ],
    },
    "shipping_damage": {
        "core": [
            "The parcel arrived damaged.",
            "The product was broken when it arrived, so it did not break in use.",
            "The product was in pieces in the box.",
            "The product was damaged on the way. It is no factory fault.",
            "The courier dropped the parcel and the product is broken.",
            "The packaging was torn and the product is damaged.",
            "The order has transport damage.",
            "There was a hole in the box.",
            "The box was crushed and the product is dented. It came in time.",
            "The package was wet and everything is ruined. The courier did it, it is no defect.",
        ],
        "short": [
            "The parcel arrived damaged.",
            "It broke on the way.",
            "The package was torn open. It is no defect of the product.",
            "The order has transport damage.",
        ],
    },
    "defect": {
        "core": [
            "The product stopped working after some time of use. It arrived whole.",
            "The product does not turn on.",
            "The battery is faulty.",
            "A part of the product is broken, and not from the delivery.",
            "The product makes a strange noise.",
            "The product has a factory fault. The parcel was fine.",
            "The product is faulty and switches itself off.",
            "The product smells of burning.",
            "The customer has a warranty claim. It is about a repair, not about money.",
            "One side of the product has gone dead.",
            "A part of the product came off after weeks of use. The courier is not to blame.",
        ],
        "short": [
            "The product is dead.",
            "The battery no longer charges.",
            "The product stopped working.",
            "The motor is broken.",
        ],
    },
    "technical": {
        "core": [
            "The app crashes.",
            "The website shows an error.",
            "The product does not connect. It is about the connection, the product is not broken.",
            "The firmware update fails.",
            "The data does not sync with the app. No new feature is asked for.",
            "A page of the website does not load.",
            "The app cannot be installed.",
            "The app shows a white screen. The device is fine.",
            "There is a bug in the app.",
            "The website is slow and full of errors in the browser.",
            "The app loses the connection since the update, so it is the software and not the product.",
        ],
        "short": [
            "The app crashes.",
            "The website shows an error.",
            "Bluetooth does not connect. The product is not broken.",
            "The firmware update fails.",
            "The website is down.",
        ],
    },
    "feature_request": {
        "core": [
            "The customer would like to have something new in the app.",
            "The customer asks to add something.",
            "The customer has an idea. Nothing is broken.",
            "The customer would like to see something new in the next version.",
            "The question is if there are plans for something new. It is a wish and not a general question.",
            "It is a feature request.",
            "An option is missing and the customer asks to add it. It is no bug.",
            "Other shops have something that is missing here.",
            "The customer has a wish for the next version.",
        ],
        "short": [
            "The customer asks to add something.",
            "The customer has a suggestion.",
            "It is a feature request.",
            "It would be nice to have something new. Nothing is broken.",
        ],
    },
    "other": {
        "core": [
            "The question is about opening hours.",
            "The customer is looking for a job.",
            "The question is about an internship. No order is named.",
            "A journalist asks for an interview.",
            "A company is interested in a partnership. It is no order and no invoice.",
            "The customer says thank you.",
            "The question is where the product is made. Nothing is wrong with it.",
            "The question is how to recycle the product. It is old, but nobody wants a repair.",
            "The customer is looking for a gift.",
            "The question is what the shop sells.",
            "The question is about colours and sizes. The customer has not ordered yet.",
            "The customer would like to get the catalogue.",
        ],
        "short": [
            "The question is about opening hours.",
            "The customer is looking for a job.",
            "The customer is looking for a gift.",
            "The customer says thank you.",
            "The question is what the shop sells.",
        ],
    },
}


def by_phrase():
    """The thought for each category and phrase."""
    found = {}
    for category, kinds in CATEGORY.items():
        for kind, thoughts in kinds.items():
            templates = phrases.CATEGORY[category][kind]
            found |= {(category, template): text for template, text in zip(templates, thoughts, strict=True)}
    return found
